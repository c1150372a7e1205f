"""Words of shell scripts: quotes, variables, arrays, defaults and arithmetic, expanded without running a shell.

What is known only at run time (`$(date)`, a variable that is set elsewhere) stays unknown, with the reason. shlex is no
help: it takes the # of `dataset#1000` for a comment, and expands nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dapo_rl.base.quote import shown
from dapo_rl.convert.shell.arithmetic import ArithmeticTextError, evaluate_arithmetic
from dapo_rl.errors import UserError

MOST_NESTED, MOST_WORDS, LONGEST_WORD, MOST_TEXT = 50, 20_000, 1 << 16, 1 << 24
"""Limits: a few doubled variables can stand for more text than fits in memory."""
_PLAIN = re.compile(r"""[^\s"'\\$`<>;&|()]+""")
_PLAIN_IN_QUOTES = re.compile(r"""[^"\\$`]+""")
_CONTINUED = re.compile(r"\\\r?\n")
"""A backslash at the end of a line, which joins it with the next one."""
_ARGUMENTS = re.compile(r"\$[@*]")
"""The arguments of the script, of which there are none, or of a function."""
_ANSI_C = re.compile(r"\$(?=')")
OF_FUNCTION = "it is known only where the function is called"
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[\d#?$!]")
SEPARATORS = "\n;&|()"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command after expansion; `unknown` says why its value is not known."""

    text: str
    unknown: str | None = None


class ShellVariables(dict[str, "Word | list[Word]"]):
    """The variables of a script, with a limit on their total size."""

    size = 0

    def assign(self, name: str, value: Word | list[Word]) -> None:
        self.grow(sum(len(word.text) + 1 for word in (value if isinstance(value, list) else [value])))
        self[name] = value

    def grow(self, size: int) -> None:
        self.size += size
        if self.size > MOST_TEXT:
            raise UserError(f"the script expands to more than {MOST_TEXT >> 20} MiB")


def _extend(words: list[Word], pieces: list[Word]) -> None:
    """Continues the last word with the first piece; each further one begins a word."""
    if words and pieces:
        words[-1] = _join(words[-1], pieces[0])
        pieces = pieces[1:]
    words += pieces
    limit_words(len(words))


def _join(left: Word, right: Word) -> Word:
    if len(left.text) + len(right.text) > LONGEST_WORD:
        raise UserError(f"a word of the script is longer than {LONGEST_WORD >> 10} KiB: {shown(left.text, 40)}")
    return Word(left.text + right.text, left.unknown or right.unknown)


class WordReader:
    """A position in the text of a script."""

    def __init__(self, text: str, variables: ShellVariables, depth: int = 0) -> None:
        if depth > MOST_NESTED:
            raise UserError("the script's expansions are nested too deeply")
        self._text = text
        self._at = 0
        self._variables = variables
        self._depth = depth

    def word(self) -> list[Word]:
        """The word at the current position: none, one or, after the expansion of variables, several."""
        return self._read(" \t\r<>" + SEPARATORS)

    def single(self) -> Word:
        """The whole text as one word, as in `${name:-text}`."""
        return self.joined(self._read("", splits=False))

    def _read(self, stops: str, splits: bool = True) -> list[Word]:
        words: list[Word] = []
        while self._at < len(self._text) and (character := self._text[self._at]) not in stops:
            if self._take(_CONTINUED):
                continue
            if splits and self._take(_ARGUMENTS):
                _extend(words, self._arguments())
            elif self._take(_ANSI_C):
                text = self._literal("'")
                _extend(words, [Word(text, "$'…' is not evaluated" if "\\" in text else None)])
            elif character in '$`"':
                pieces = self._quoted() if character == '"' else self._expansion()
                if not splits:
                    pieces = [self.joined(pieces)]
                elif character != '"':  # without quotes, a value with spaces is several words
                    pieces = [part for piece in pieces for part in _split(piece)]
                _extend(words, pieces)
            else:
                _extend(words, [Word(self._literal(character))])
        return words

    def _take(self, pattern: re.Pattern[str]) -> str:
        """The text at the current position that matches, if any; moves behind it."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _literal(self, character: str) -> str:
        """Plain characters, an escaped one, or the content of single quotes."""
        if plain := self._take(_PLAIN):
            return plain
        self._at += 1
        if character == "\\":
            self._at += 1
            return self._text[self._at - 1 : self._at]
        if character != "'":
            return character
        end = self._text.find("'", self._at)
        if end < 0:
            raise UserError("a quote is not closed")
        content, self._at = self._text[self._at : end], end + 1
        return content

    def _quoted(self) -> list[Word]:
        """Double quotes: one word, but an array stays several."""
        self._at += 1
        words: list[Word] = []
        vanished = False  # "$@" without arguments and "${empty[@]}" are no word; "" is one
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == '"':
                self._at += 1
                return words or ([] if vanished else [Word("")])
            if self._take(_CONTINUED):
                continue
            if self._take(_ARGUMENTS):
                _extend(words, pieces := self._arguments())
                vanished |= not pieces
            elif character in "$`":
                pieces = self._expansion()
                vanished |= not pieces
                _extend(words, pieces)
            elif plain := self._take(_PLAIN_IN_QUOTES):
                _extend(words, [Word(plain)])
            else:
                self._at += 1 + (self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"))
                _extend(words, [Word(self._text[self._at - 1])])
        raise UserError("a quote is not closed")

    def _expansion(self) -> list[Word]:
        """Expands `$…` or a backquoted command."""
        text, at = self._text, self._at
        if text[at] == "`":
            end = text.find("`", at + 1)
            self._at = end + 1 if end >= 0 else len(text)
            return [Word(text[at : self._at], "a command in the script is not run")]
        if text.startswith("$((", at):
            inside = self._bracketed("(", ")", at + 1)[1:-1]
            return [self._arithmetic(inside)]
        if text.startswith("$(", at):
            return [Word(f"$({self._bracketed('(', ')', at + 1)})", "a command in the script is not run")]
        if text.startswith("${", at):
            return self._braces(self._bracketed("{", "}", at + 1))
        self._at += 1
        if not (name := self._take(_PARAMETER)):
            return [Word("$")]
        if name == "#":  # the number of arguments: as for $@, the script is run without any
            return [Word("$#", OF_FUNCTION) if self._arguments() else Word("0")]
        is_name = name[0].isalpha() or name[0] == "_"
        return self._variable(name) if is_name else [Word(f"${name}", f"${name} is set when the script runs")]

    def _bracketed(self, opening: str, closing: str, at: int) -> str:
        """The text between brackets that start at `at`; moves behind it."""
        start, quoted, outer = at, False, list[bool]()  # whether each open bracket is in double quotes
        while at < len(self._text):
            character = self._text[at]
            if character == "\\":
                at += 1
            elif character == '"':
                quoted = not quoted
            elif character == "'" and opening == "(" and not quoted:
                at = max(self._text.find("'", at + 1), at)
            elif character == opening:
                outer.append(quoted)
                quoted = False
            elif character == closing:
                quoted = outer.pop()
            at += 1
            if not outer:
                self._at = at
                return self._text[start + 1 : at - 1]
        raise UserError(f"${opening} is not closed")

    def _arguments(self) -> list[Word]:
        """What `$@` stands for, with or without quotes."""
        return []

    def _variable(self, name: str) -> list[Word]:
        value = self._variables.get(name)
        if value is None:
            return [Word(f"${name}", f"${name} is not set in the script")]
        return value[:1] if isinstance(value, list) else [value]

    def _braces(self, inside: str) -> list[Word]:
        """`${name}`, `${name:-default}`, `${name[@]}` and their relatives."""
        shown_whole = Word(f"${{{inside}}}", f"${{{inside[:40]}}} is not evaluated")
        match = re.match(r"(\d|[A-Za-z_]\w*)(\[[@*]\])?(.*)", inside, re.DOTALL)
        if match is None:
            return [shown_whole]
        name, every, operation = match.groups()
        if name.isdigit() and self._arguments():
            return [Word(shown_whole.text, OF_FUNCTION)]
        value = self._variables.get(name)
        if every == "[*]" and isinstance(value, list) and not operation:
            return [self.joined(value)]
        if every and not operation:
            return list(value) if isinstance(value, list) else [value] if value else []
        if not operation:
            return self._variable(name)
        current = value[0] if isinstance(value, list) and value else value if isinstance(value, Word) else None
        if default := re.match(r"(:?)([-=+?])(.*)", operation, re.DOTALL):
            colon, kind, text = default.groups()
            is_set = current is not None and bool(current.text or not colon)
            if kind == "+":
                return [self._inner(text).single()] if is_set else []
            if is_set and current is not None:
                return [current]
            if kind == "?":
                return [Word(f"${name}", f"${name} is not set in the script")]
            result = self._inner(text).single()
            if kind == "=":
                self._variables.assign(name, result)
            return [result]
        if current is not None and current.unknown is None:
            changed = self._trimmed(current.text, operation)
            if changed is not None:
                return [Word(changed)]
        return [shown_whole]

    def _trimmed(self, text: str, operation: str) -> str | None:
        """`${name##*/}` and `${name%.*}`, `${name,,}` and `${name^^}`."""
        if operation in (",,", "^^"):
            return text.lower() if operation == ",," else text.upper()
        match = re.fullmatch(r"(##?|%%?)([^*]*\*?[^*]*)", operation)
        if match is None or len(text) > 1000:
            return None
        sign, pattern = match.groups()
        ends = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
        for length in ends:
            part = text[:length] if sign[0] == "#" else text[len(text) - length :]
            if fnmatchcase(part, pattern):
                return text[length:] if sign[0] == "#" else text[: len(text) - length]
        return text

    def _arithmetic(self, inside: str) -> Word:
        expanded = self._inner(inside).single()
        whole = f"$(({inside}))"
        if expanded.unknown:
            return Word(whole, expanded.unknown)
        try:
            return Word(str(evaluate_arithmetic(expanded.text, self._number)))
        except ArithmeticTextError as error:
            return Word(whole, str(error))

    def _number(self, name: str) -> int:
        value = self.joined(self._variable(name))
        if value.unknown:
            raise ArithmeticTextError(value.unknown)
        if self._depth >= MOST_NESTED:
            raise ArithmeticTextError("it is nested too deeply")
        return evaluate_arithmetic(value.text or "0", self._inner("")._number)

    def _inner(self, text: str) -> WordReader:
        return WordReader(text, self._variables, self._depth + 1)

    @staticmethod
    def joined(words: list[Word]) -> Word:
        unknown = next((word.unknown for word in words if word.unknown), None)
        return Word(" ".join(word.text for word in words)[:LONGEST_WORD], unknown)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]


def _split(piece: Word) -> list[Word]:
    return [piece] if piece.unknown else [Word(part) for part in piece.text.split()]


def limit_words(count: int) -> None:
    if count > MOST_WORDS:
        raise UserError(f"the script expands to more than {MOST_WORDS} words")
