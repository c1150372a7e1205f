"""Reads shell scripts without running them: words, variables, arrays, defaults and arithmetic.

What only a run would tell (`$(date)`, a variable that is set elsewhere or in a condition) stays unknown, with the
reason. shlex is no help: it takes the # of `dataset#1000` for a comment, and expands nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from dapo_rl.base.quote import shown
from dapo_rl.errors import UserError
from dapo_rl.moving.arithmetic import ArithmeticTextError, evaluate_arithmetic

MOST_NESTED, MOST_WORDS, LONGEST_WORD, MOST_TEXT = 50, 20_000, 1 << 16, 1 << 24
"""Limits: a few doubled variables can stand for more text than fits in memory."""
_PLAIN = re.compile(r"""[^\s"'\\$`<>;&|()]+""")
_PLAIN_IN_QUOTES = re.compile(r"""[^"\\$`]+""")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_OPENING = {"if", "for", "while", "until", "case", "{", "select"}
_CLOSING = {"fi", "done", "esac", "}"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "local", "readonly", "declare", "typeset"}
_SEPARATORS = "\n;&|()"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command after expansion; `unknown` says why its value is not known."""

    text: str
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class ShellCommand:
    words: tuple[Word, ...]
    variables: Mapping[str, Word]
    """The variables given before it on its line, and those of the script that the reader asked for."""


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


@dataclass(slots=True)
class _Line:
    """A command while it is read."""

    words: list[Word] = field(default_factory=list)
    assigned: dict[str, Word | list[Word]] = field(default_factory=dict)


class ShellReader:
    """A pass over the text of a script. Variables are set in the order of the text."""

    def __init__(self, text: str, variables: ShellVariables, depth: int = 0, seen: Collection[str] = ()) -> None:
        if depth > MOST_NESTED:
            raise UserError("the script's expansions are nested too deeply")
        self._text = text.replace("\\\r\n", "").replace("\\\n", "")
        self._at = 0
        self._variables = variables
        self._depth = depth
        self._seen = seen
        self._blocks = 0
        """Conditions, loops and functions around the current command."""
        self._here_documents: list[str] = []
        self._count = 0

    def commands(self) -> list[ShellCommand]:
        found: list[ShellCommand] = []
        line = _Line()
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r":
                self._at += 1
            elif character == "#":
                self._skip_comment()
            elif character in _SEPARATORS:
                self._end(line, found)
                line = _Line()
                self._at += 1
                if character == "\n":
                    self._skip_here_documents()
            elif character in "<>":
                self._redirect(line)
            else:
                self._read_into(line)
        self._end(line, found)
        return found

    def _read_into(self, line: _Line) -> None:
        match = _ASSIGNMENT.match(self._text, self._at)
        declaring = bool(line.words) and line.words[0].text in _DECLARING
        if match and (declaring or not line.words):
            self._at = match.end()
            name, added = match[1], match[2] == "+="
            value: Word | list[Word] = self._array() if self._peek() == "(" else self._joined(self.word())
            line.assigned[name] = self._plus(self._variables.get(name), value) if added else value
            return
        words = self.word()
        if not line.words and words and words[0].text in _BETWEEN:
            return
        line.words += words
        self._count += len(words)
        _limit(self._count)
        self._variables.grow(sum(len(word.text) for word in words))

    def _end(self, line: _Line, found: list[ShellCommand]) -> None:
        first = line.words[0].text if line.words else ""
        if first in _CLOSING:
            self._blocks = max(self._blocks - 1, 0)
        if first == "for" and len(line.words) > 1 and _NAME.fullmatch(name := line.words[1].text):
            self._variables[name] = Word(f"${name}", "it is set by a loop")
        if not line.words or first in _DECLARING:
            for name, value in line.assigned.items():
                self._variables.assign(name, self._guarded(name, value))
        elif line.words:
            seen = {name: self._variables.get(name) for name in self._seen} | line.assigned
            variables = {name: value for name, value in seen.items() if isinstance(value, Word)}
            found.append(ShellCommand(tuple(line.words), variables))
        if first in _OPENING:
            self._blocks += 1

    def _guarded(self, name: str, value: Word | list[Word]) -> Word | list[Word]:
        """A value that is set in a condition or a loop is not known."""
        if not self._blocks:
            return value
        return Word(f"${name}", "it is set in a condition, a loop or a function")

    def _array(self) -> list[Word]:
        """`( a b "c d" )`, over any number of lines."""
        self._at += 1
        items: list[Word] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] in " \t\r\n":
                self._at += 1
            elif self._text[self._at] == "#":
                self._skip_comment()
            else:
                before = self._at
                items += self.word()
                _limit(len(items))
                self._at += self._at == before  # a separator, which means nothing here
        self._at += 1
        return items

    @staticmethod
    def _plus(old: Word | list[Word] | None, new: Word | list[Word]) -> Word | list[Word]:
        if isinstance(new, list):
            items = [*(old if isinstance(old, list) else [old] if old else []), *new]
            _limit(len(items))
            return items
        if isinstance(old, Word):
            return Word((old.text + new.text)[:LONGEST_WORD], old.unknown or new.unknown)
        return new

    def word(self) -> list[Word]:
        """The word at the current position: none, one or, after the expansion of variables, several."""
        done: list[Word] = []
        current: Word | None = None
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r<>" or character in _SEPARATORS:
                break
            if character == "$" and self._text.startswith(("$@", "$*"), self._at):
                self._at += 2
            elif character in "$`":
                pieces = self._expansion()
                # Without quotes, a value with spaces is several words.
                current, done = _attach(current, done, [part for piece in pieces for part in _split(piece)])
            elif character == '"':
                current, done = _attach(current, done, self._quoted())
            elif plain := _PLAIN.match(self._text, self._at):
                current = _join(current, Word(plain[0]))
                self._at = plain.end()
            else:
                current = _join(current, Word(self._literal(character)))
        return [*done, current] if current is not None else done

    def single(self) -> Word:
        """The whole text as one word, as in `${name:-text}`."""
        result = Word("")
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "$`":
                result = _join(result, self._joined(self._expansion()))
            elif character == '"':
                result = _join(result, self._joined(self._quoted()))
            elif plain := _PLAIN.match(self._text, self._at):
                result = _join(result, Word(plain[0]))
                self._at = plain.end()
            else:
                result = _join(result, Word(self._literal(character)))
        return result

    def _literal(self, character: str) -> str:
        """One character, an escaped one, or the content of single quotes."""
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
        done: list[Word] = []
        current: Word | None = None
        vanished = False  # "$@" without arguments and "${empty[@]}" are no word; "" is one
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == '"':
                self._at += 1
                return [*done, current or Word("")] if current or not vanished else done
            if self._text.startswith(("$@", "$*"), self._at):
                self._at += 2
                vanished = True
            elif character in "$`":
                pieces = self._expansion()
                vanished |= not pieces
                current, done = _attach(current, done, pieces)
            elif character == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                current = _join(current, Word(self._text[self._at + 1]))
                self._at += 2
            elif plain := _PLAIN_IN_QUOTES.match(self._text, self._at):
                current = _join(current, Word(plain[0]))
                self._at = plain.end()
            else:
                current = _join(current, Word(character))
                self._at += 1
        raise UserError("a quote is not closed")

    def _expansion(self) -> list[Word]:
        """What `$…` or a backquoted command stands for."""
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
        if match := _NAME.match(text, at + 1):
            self._at = match.end()
            return self._variable(match[0])
        self._at += 1
        if text[at + 1 : at + 2].isdigit() or text[at + 1 : at + 2] in ("?", "$", "#", "!"):
            self._at += 1
            return [Word(text[at : at + 2], f"{text[at : at + 2]} is set when the script runs")]
        return [Word("$")]

    def _bracketed(self, opening: str, closing: str, at: int) -> str:
        """The text between brackets that start at `at`; moves behind it."""
        depth, start = 0, at
        while at < len(self._text):
            character = self._text[at]
            if character == "\\":
                at += 1
            elif character == "'" and opening == "(":
                at = max(self._text.find("'", at + 1), at)
            depth += (character == opening) - (character == closing)
            at += 1
            if depth == 0:
                self._at = at
                return self._text[start + 1 : at - 1]
        raise UserError(f"${opening} is not closed")

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
        value = self._variables.get(name)
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
        value = self._joined(self._variable(name))
        if value.unknown:
            raise ArithmeticTextError(value.unknown)
        if self._depth >= MOST_NESTED:
            raise ArithmeticTextError("it is nested too deeply")
        return evaluate_arithmetic(value.text or "0", self._inner("")._number)

    def _inner(self, text: str) -> ShellReader:
        return ShellReader(text, self._variables, self._depth + 1)

    @staticmethod
    def _joined(words: list[Word]) -> Word:
        unknown = next((word.unknown for word in words if word.unknown), None)
        return Word(" ".join(word.text for word in words)[:LONGEST_WORD], unknown)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _redirect(self, line: _Line) -> None:
        """Skips `2>&1`, `> FILE`, `< FILE` and here-documents."""
        start = self._at
        while self._peek() in ("<", ">", "&", "-") and self._peek():
            self._at += 1
        operator = self._text[start : self._at]
        if line.words and line.words[-1].text in ("1", "2") and self._text[start - 1] in "12":
            line.words.pop()
        if self._peek() == "(":  # <(command)
            self._bracketed("(", ")", self._at)
            return
        while self._peek() in (" ", "\t"):
            self._at += 1
        target = self.word()
        if operator.startswith("<<") and not operator.startswith("<<<") and target:
            self._here_documents.append(target[0].text)

    def _skip_here_documents(self) -> None:
        for end in self._here_documents:
            match = re.compile(rf"^\t*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            self._at = match.end() if match else len(self._text)
        self._here_documents.clear()


def _split(piece: Word) -> list[Word]:
    return [piece] if piece.unknown else [Word(part) for part in piece.text.split()]


def _join(left: Word | None, right: Word) -> Word:
    if left is None:
        return right
    if len(left.text) + len(right.text) > LONGEST_WORD:
        raise UserError(f"a word of the script is longer than {LONGEST_WORD >> 10} KiB: {shown(left.text, 40)}")
    return Word(left.text + right.text, left.unknown or right.unknown)


def _attach(current: Word | None, done: list[Word], pieces: list[Word]) -> tuple[Word | None, list[Word]]:
    """Continues a word with expanded pieces: the first belongs to it, the last may go on."""
    if not pieces:
        return current, done
    first = _join(current, pieces[0])
    if len(pieces) == 1:
        return first, done
    done += [first, *pieces[1:-1]]
    _limit(len(done))
    return pieces[-1], done


def _limit(count: int) -> None:
    if count > MOST_WORDS:
        raise UserError(f"the script expands to more than {MOST_WORDS} words")


def read_shell(text: str, environment: Mapping[str, str], seen: Collection[str] = ()) -> list[ShellCommand]:
    """The commands of a script, each with its own variables and those `seen`. Nothing is run."""
    variables = ShellVariables({name: Word(value) for name, value in environment.items()})
    return ShellReader(text, variables, seen=seen).commands()
