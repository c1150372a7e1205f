"""Splits an answer into tokens: numbers, commands, letters and signs."""

from __future__ import annotations

import re
from typing import NoReturn

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
_TOKEN = re.compile(
    rf" *(?:(?P<number>{_NUMBER})|(?P<command>\\(?:[A-Za-z]+|[{{}}\\]))|(?P<letter>[A-Za-z])"
    r"|(?P<sign>[-+*/^_!=<>,;:()\[\]{}|&]))"
)
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{5}")
_DERIVATIVE = re.compile(r"\\frac\{(?:d|\\Delta)[^{}]*\}\{(?:d|\\Delta)[^{}]*[A-Za-z]|d[a-z]?/d[a-z]")
"""A derivative: its letters are not factors, and do not cancel."""
_MATRIX = re.compile(
    r"(?P<begin>[(\[]\\begin\{(?:array\}\{[clr|]*|matrix)\}|\\begin\{[pb]?matrix\})"
    r"|\\end\{(?:array|matrix)\}[)\]]|\\end\{[pb]?matrix\}"
)
_BASE_NAMES = "two|three|four|five|six|seven|eight|nine|ten|twelve"
_BASES = dict(zip(_BASE_NAMES.split("|"), map(str, (*range(2, 11), 12)), strict=True))


class NotAnExpressionError(ValueError):
    """The grammar does not cover the text."""


class Tokens:
    """The tokens of a text, consumed from the left."""

    def __init__(self, text: str) -> None:
        # Matrix delimiters become single signs, without their names.
        text = _MATRIX.sub(lambda match: r"\matrix " if match["begin"] else r"\endmatrix ", text)
        text = re.sub(r"_\{?([a-z]+)\}?", lambda m: f"_{{{_BASES.get(m[1], m[1])}}}", text)
        if _WORD.search(text) or _DERIVATIVE.search(text):
            raise NotAnExpressionError(text)
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise NotAnExpressionError(text)
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self._next = 0

    def fail(self) -> NoReturn:
        raise NotAnExpressionError(f"at token {self._next}")

    @property
    def token(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    @property
    def kind(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

    def take(self, *wanted: str) -> str:
        token = self.token
        if not token or (wanted and token not in wanted):
            self.fail()
        self._next += 1
        return token

    def takes(self, *wanted: str) -> bool:
        if self.token and self.token in wanted:
            self._next += 1
            return True
        return False

    @property
    def at_end(self) -> bool:
        return self._next == len(self._tokens)
