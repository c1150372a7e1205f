"""Reads shell scripts without running them: commands, assignments, conditions and loops.

Branches whose condition is known are followed or skipped. What is assigned under a condition that only a run would
tell stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from dapo_rl.convert.shell.conditions import Block, both, either, holds, matches_any, opposite, status_of
from dapo_rl.convert.shell.words import LONGEST_WORD, OF_FUNCTION, ShellVariables, Word, WordReader, limit_words
from dapo_rl.errors import UserError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[\n;&|()]")
_KEYWORD = re.compile(
    r"(if|then|elif|else|fi|while|until|do|done|case|esac|function|time|!|\{|\}|\[\[)(?=[\s;&|()<>]|$)|(\(\()"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_CHANGED = re.compile(r"\b(\w+)\b\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*(\w+)")
"""Variables that arithmetic assigns."""
_SPACES = re.compile(r"[ \t]+")
_BLANKS = re.compile(r"(?:[ \t\r]|#[^\n]*|\\\r?\n)+")
_BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*|\\\r?\n)+")
_REDIRECTION = re.compile(r"[<>][<>&-]*")
_FUNCTION_NAME = re.compile(r"[ \t]*[\w.-]*[ \t]*(\([ \t]*\))?")
_IN, _ESAC = re.compile(r"in(?=\s)"), re.compile(r"esac(?=[\s;&|()<>]|$)")
_IN_BRACKETS = re.compile(r"&&|\|\||[()<>;&|]")
_DECLARING = {"export", "local", "readonly", "declare", "typeset"}
_MOST_LEVELS = 3
"""Of `eval` in `eval`."""
_SOMETIMES = "it is set in a condition or a loop"


@dataclass(frozen=True, slots=True)
class ShellCommand:
    words: tuple[Word, ...]
    variables: Mapping[str, Word]
    """The variables given before it on its line, and those of the script that the reader asked for."""


@dataclass(slots=True)
class _Line:
    """A command while it is read."""

    words: list[Word] = field(default_factory=list)
    assigned: dict[str, tuple[Word | list[Word], bool]] = field(default_factory=dict)
    """The values, and whether `+=` appends them."""

    def __bool__(self) -> bool:
        return bool(self.words or self.assigned)


class ShellReader(WordReader):
    """A pass over the text of a script. Variables are set in the order of the text."""

    def __init__(self, text: str, variables: ShellVariables, seen: Collection[str] = (), level: int = 0) -> None:
        super().__init__(text, variables)
        self._seen, self._level = seen, level
        self._blocks = [Block("script")]
        self._line = _Line()
        self._found: list[ShellCommand] = []
        self._defines_function = False
        self._here_documents: list[str] = []
        self._count = 0

    def commands(self) -> list[ShellCommand]:
        while self._at < len(self._text):
            if self._blocks[-1].awaits_pattern:
                self._patterns()
            elif self._take(_BLANKS):
                continue
            elif not self._line and (keyword := self._take(_KEYWORD)):
                self._keyword(keyword)
            elif operator := _OPERATOR.match(self._text, self._at):
                self._operator(operator[0])
            elif redirection := self._take(_REDIRECTION):
                self._redirect(redirection)
            else:
                self._read_words()
        self._end()
        return self._found

    def _read_words(self) -> None:
        line = self._line
        match = _ASSIGNMENT.match(self._text, self._at)
        declaring = bool(line.words) and line.words[0].text in _DECLARING
        if match and (declaring or not line.words):
            self._at = match.end()
            value: Word | list[Word] = self._parenthesised() if self._peek() == "(" else self.joined(self.word())
            line.assigned[match[1]] = value, match[2] == "+="
            return
        words = self.word()
        line.words += words
        self._count += len(words)
        limit_words(self._count)
        self._variables.grow(sum(len(word.text) for word in words))

    def _arguments(self) -> list[Word]:
        in_function = any(block.kind == "function" for block in self._blocks)
        return [Word("(arguments)", OF_FUNCTION)] if in_function else []

    def _end(self) -> None:
        """Ends a command: assigns its variables, or records it with them."""
        line, self._line = self._line, _Line()
        if not line:
            return
        block = self._blocks[-1]
        first = line.words[0].text if line.words else ""
        if first in ("for", "select"):
            if len(line.words) > 1 and _NAME.fullmatch(name := line.words[1].text):
                self._set(name, Word(f"${name}", "it is set by a loop"))
            self._open("for")
        elif not line.words or first in _DECLARING:
            for name, (value, added) in line.assigned.items():
                self._assign(name, _appended(self._variables.get(name), value) if added else value)
            block.finish(True)
        else:
            self._change(first, [word.text for word in line.words[1:]])
            if block.runs is not False:
                values = {name: self._variables.get(name) for name in self._seen}
                values |= {name: value for name, (value, _) in line.assigned.items()}
                known = {name: value for name, value in values.items() if isinstance(value, Word)}
                self._found.append(ShellCommand(tuple(line.words), known))
                self._read_inner(line)
            block.finish(status_of(line.words))

    def _read_inner(self, line: _Line) -> None:
        """Reads the commands of `eval "…"`, or of `bash -c "…"`, which sets its variables for itself alone."""
        words = [word.text for word in line.words]
        is_eval = words[0] == "eval"
        start = 1 if is_eval else next((at + 2 for at, pair in enumerate(pairwise(words)) if _is_shell(*pair)), 0)
        if not start or self._level == _MOST_LEVELS:
            return
        text = " ".join(words[start:] if is_eval else words[start : start + 1])
        variables = self._variables
        if not is_eval or not self._blocks[-1].runs:
            variables = ShellVariables(variables | {name: value for name, (value, _) in line.assigned.items()})
            variables.size = self._variables.size
        with suppress(UserError):  # not a script
            self._found += ShellReader(text, variables, self._seen, self._level + 1).commands()
        self._variables.size = variables.size

    def _change(self, command: str, words: Sequence[str]) -> None:
        """Forgets the variables that a command changes."""
        if command in ("unset", "read", "mapfile", "readarray", "let", "((") and self._blocks[-1].runs is not False:
            for name in (match[0] for word in words if (match := _NAME.match(word))):
                self._set(name, Word(f"${name}", f"it is changed by {command}"))
                if command == "unset" and self._blocks[-1].runs:
                    self._variables.pop(name)

    def _assign(self, name: str, value: Word | list[Word]) -> None:
        """Sets a variable, as far as the conditions around it are known to hold."""
        runs, old = self._blocks[-1].runs, self._variables.get(name)
        if runs is not False and value != old:
            self._set(name, value if runs else _perhaps(name, old, value))

    def _set(self, name: str, value: Word | list[Word]) -> None:
        for block in reversed(self._blocks):
            if block.kind in ("function", "subshell"):
                block.before.setdefault(name, self._variables.get(name))
                break
        self._variables.assign(name, value)

    def _parenthesised(self) -> list[Word]:
        """`( a b "c d" )`, over any number of lines: an array, or from `a | b)` the patterns of `case`."""
        self._at += self._peek() == "("
        items: list[Word] = []
        self._take(_BLANK_LINES)
        while self._at < len(self._text) and self._peek() != ")":
            before = self._at
            items += self.word()
            limit_words(len(items))
            self._at += self._at == before  # a separator
            self._take(_BLANK_LINES)
        self._at += 1
        return items

    def _keyword(self, keyword: str) -> None:
        block = self._blocks[-1]
        match keyword:
            case "if" | "while" | "until":
                self._open(keyword)
            case "then" if block.kind == "if":
                block.begin_branch()
            case "elif" | "else" if block.kind == "if":
                block.end_branch()
            case "do" if block.kind in ("while", "until"):
                # A loop runs any number of times, or never if its condition is known not to hold.
                starts = block.status if block.kind == "while" else opposite(block.status)
                block.branch, block.following = both(starts, None), True
            case "fi" | "done" | "esac" | "}":
                self._close()
            case "case":
                self._case()
            case "function":
                self._take(_FUNCTION_NAME)
                self._defines_function = True
            case "{":
                self._open("function" if self._defines_function else "group")
                self._defines_function = False
            case "!":
                block.negated = not block.negated
            case "[[":
                self._double_brackets()
            case "((":
                inside = self._bracketed("(", ")", self._at - 2)  # not evaluated
                self._change("((", [before or after for before, after in _CHANGED.findall(inside)])
                block.finish(None)

    def _operator(self, operator: str) -> None:
        """`&&`, `;`, the end of a line, parentheses and their relatives."""
        defined = self._line.words and not self._line.assigned and re.compile(r"\(\s*\)").match(self._text, self._at)
        if operator == "(" and defined and len(self._line.words) == 1:
            self._at = defined.end()
            self._line = _Line()
            self._defines_function = True
            return
        self._end()
        self._at += len(operator)
        block = self._blocks[-1]
        if operator == "(":
            self._open("subshell")
        elif operator == ")":
            if block.kind == "subshell":
                self._close()
        elif operator.startswith(";") and len(operator) > 1:
            if block.kind == "case":
                block.end_branch()
                block.awaits_pattern = True
        else:
            block.separate(operator)
        if operator == "\n":
            self._skip_here_documents()

    def _open(self, kind: str, branch: bool | None = True) -> None:
        branch = None if kind == "for" else branch
        self._blocks.append(Block(kind, self._blocks[-1].runs, branch))

    def _close(self) -> None:
        """`fi`, `done`, `esac`, `}` or the end of a subshell."""
        if len(self._blocks) == 1:
            return
        block = self._blocks.pop()
        for name, old in block.before.items():
            if old is None:
                self._variables.pop(name, None)
            else:
                self._variables.assign(name, old)
            if block.kind == "function":
                self._set(name, Word(f"${name}", "it is set in a function"))
        self._blocks[-1].finish(block.status if block.kind in ("group", "subshell") else None)

    def _case(self) -> None:
        """`case WORD in`"""
        self._take(_BLANK_LINES)
        subject = self.joined(self.word())
        self._take(_BLANK_LINES)
        if self._take(_IN):
            self._open("case")
            self._blocks[-1].subject, self._blocks[-1].awaits_pattern = subject, True

    def _patterns(self) -> None:
        """`a | b)`, the patterns before a branch of `case`, or its end."""
        block = self._blocks[-1]
        block.awaits_pattern = False
        self._take(_BLANK_LINES)
        if not _ESAC.match(self._text, self._at):
            block.status = matches_any(block.subject or Word(""), self._parenthesised())
            block.begin_branch()

    def _double_brackets(self) -> None:
        """`[[ a == b && -n c ]]`; with parentheses it is not evaluated."""
        outcome: bool | None = False
        every: bool | None = True
        words: list[Word] = []
        nested = False
        while self._at < len(self._text):
            self._take(_BLANK_LINES)
            if not (operator := self._take(_IN_BRACKETS)):
                word = self.word() or [Word("")]  # a variable without a value is still an operand
                if [part.text for part in word] == ["]]"]:
                    break
                words.append(self.joined(word))
                limit_words(len(words))
                continue
            if operator not in ("&&", "||"):
                nested = True
                continue
            every, words = both(every, holds(words, patterns=True)), []
            if operator == "||":
                outcome, every = either(outcome, every), True
        outcome = either(outcome, both(every, holds(words, patterns=True)))
        self._blocks[-1].finish(None if nested else outcome)

    def _redirect(self, operator: str) -> None:
        """Skips `2>&1`, `> FILE`, `< FILE` and here-documents."""
        words = self._line.words
        if words and words[-1].text in ("1", "2") and self._text[self._at - len(operator) - 1] in "12":
            words.pop()
        if self._peek() == "(":  # <(command)
            self._bracketed("(", ")", self._at)
            return
        self._take(_SPACES)
        target = self.word()
        if operator.startswith("<<") and not operator.startswith("<<<") and target:
            self._here_documents.append(target[0].text)

    def _skip_here_documents(self) -> None:
        for end in self._here_documents:
            match = re.compile(rf"^\t*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            self._at = match.end() if match else len(self._text)
        self._here_documents.clear()


def _is_shell(word: str, option: str) -> bool:
    return word.rpartition("/")[2] in ("bash", "sh", "zsh") and re.fullmatch(r"-[a-z]*c", option) is not None


def _appended(old: Word | list[Word] | None, new: Word | list[Word]) -> Word | list[Word]:
    """`name+=value`"""
    if isinstance(new, list):
        items = [*(old if isinstance(old, list) else [old] if old else []), *new]
        limit_words(len(items))
        return items
    if isinstance(old, Word):
        return Word((old.text + new.text)[:LONGEST_WORD], old.unknown or new.unknown)
    return new


def _perhaps(name: str, old: Word | list[Word] | None, new: Word | list[Word]) -> Word | list[Word]:
    """A variable that has the old value or the new one. The items of an array are known if both arrays have them."""
    if not isinstance(new, list) or isinstance(old, Word):
        return Word(f"${name}", _SOMETIMES)
    before, after = set(old or ()), set(new)
    items = [item if item in after else Word(item.text, item.unknown or _SOMETIMES) for item in old or ()]
    items += [Word(item.text, item.unknown or _SOMETIMES) for item in new if item not in before]
    limit_words(len(items))
    return items


def read_shell(text: str, environment: Mapping[str, str], seen: Collection[str] = ()) -> list[ShellCommand]:
    """The commands of a script that can run, each with its own variables and those `seen`. Nothing is run."""
    variables = ShellVariables({name: Word(value) for name, value in environment.items()})
    return ShellReader(text, variables, seen).commands()
