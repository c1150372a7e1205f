"""Conditions of shell scripts: whether a command runs, where that can be told without running anything.

A condition is True, False, or None if it is known only at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt, ne

from dapo_rl.convert.shell.words import Word

_COMPARISONS = {"-eq": eq, "-ne": ne, "-gt": gt, "-ge": ge, "-lt": lt, "-le": le}
_LONGEST_COMPARED = 1000
_SUCCEED = {"true", ":", "echo", "printf", "cd", "set", "mkdir", "source", ".", "shopt", "ulimit", "unset", "trap"}
"""Commands that are taken to succeed."""


def both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def either(left: bool | None, right: bool | None) -> bool | None:
    return opposite(both(opposite(left), opposite(right)))


@dataclass(slots=True)
class Block:
    """The script, or a part of it that runs under a condition: a branch of `if` or `case`, a loop, a function."""

    kind: str
    outer: bool | None = True
    """Whether the block as a whole is reached."""
    branch: bool | None = True
    """Whether the current branch is taken."""
    taken: bool | None = False
    """Whether an earlier branch was."""
    following: bool | None = True
    """Whether the next command of a list such as `a && b` runs, as far as the list decides it."""
    status: bool | None = True
    """Whether the last command succeeded."""
    negated: bool = False
    """Whether `!` precedes the next command."""
    subject: Word | None = None
    """The word that `case` compares; the patterns of the next branch follow if `awaits_pattern`."""
    awaits_pattern: bool = False
    before: dict[str, Word | list[Word] | None] = field(default_factory=dict)
    """The values that variables had before a function or a subshell, where it sets them."""

    @property
    def runs(self) -> bool | None:
        return both(self.outer, both(self.branch, self.following))

    def finish(self, status: bool | None) -> None:
        if self.negated:
            status, self.negated = opposite(status), False
        if self.following is True:
            self.status = status
        elif self.following is None and status != self.status:
            self.status = None

    def separate(self, operator: str) -> None:
        """Moves on to the next command behind `&&`, `||`, `|` or the end of a list."""
        if operator == "&&":
            self.following = self.status
        elif operator == "||":
            self.following = opposite(self.status)
        elif not operator.startswith("|"):
            self.following = True

    def begin_branch(self) -> None:
        """`then`: the branch is taken if its condition holds and no earlier one was."""
        self.branch, self.following = both(opposite(self.taken), self.status), True

    def end_branch(self) -> None:
        """`elif`, `else` and `;;`: what follows is reached if no branch was taken so far."""
        self.taken = either(self.taken, self.branch)
        self.branch, self.following = opposite(self.taken), True


def matches_any(subject: Word, patterns: Sequence[Word]) -> bool | None:
    found: bool | None = False
    for pattern in patterns:
        if pattern.text == "*" and not pattern.unknown:
            return True
        found = either(found, _matches(subject, pattern))
    return found


def _matches(subject: Word, pattern: Word) -> bool | None:
    if subject.unknown or pattern.unknown or max(len(subject.text), len(pattern.text)) > _LONGEST_COMPARED:
        return None
    return fnmatchcase(subject.text, pattern.text)


def status_of(words: Sequence[Word]) -> bool | None:
    name, rest = words[0].text, list(words[1:])
    if name in _SUCCEED:
        return True
    if name == "false":
        return False
    if name == "test":
        return holds(rest, patterns=False)
    if name == "[" and rest and rest[-1].text == "]":
        return holds(rest[:-1], patterns=False)
    return None


def holds(words: Sequence[Word], patterns: bool) -> bool | None:
    """The outcome of `[ … ]`, or with `patterns` of `[[ … ]]` without && and ||."""
    if words and words[0].text == "!" and not words[0].unknown:
        return opposite(holds(words[1:], patterns)) if len(words) < _LONGEST_COMPARED else None
    if any(word.unknown for word in words):
        return None
    if len(words) == 1:
        return bool(words[0].text)
    if len(words) == 2 and words[0].text in ("-z", "-n"):
        return bool(words[1].text) == (words[0].text == "-n")
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator.text in ("=", "==", "!="):
        equal = _matches(left, right) if patterns else left.text == right.text
        return opposite(equal) if operator.text == "!=" else equal
    compare = _COMPARISONS.get(operator.text)
    try:
        return None if compare is None else bool(compare(int(left.text[:20]), int(right.text[:20])))
    except ValueError:
        return None
