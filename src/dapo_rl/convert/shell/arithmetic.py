"""Integer arithmetic of the shell, `$((1024 * 8))`, without running a shell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|\*\*|<<|>>|[-+*/%()])")
_MOST_TOKENS, _MOST_NESTED = 1000, 50
_LARGEST = 2**63


class ArithmeticTextError(ValueError):
    """Not integer arithmetic that this evaluates."""


def _quotient(left: int, right: int) -> int:
    """Rounds towards zero, as in C."""
    if right == 0:
        raise ArithmeticTextError("division by zero")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATORS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "<<": (1, operator.lshift),
    ">>": (1, operator.rshift),
    "+": (2, operator.add),
    "-": (2, operator.sub),
    "*": (3, operator.mul),
    "/": (3, _quotient),
    "%": (3, lambda left, right: left - _quotient(left, right) * right),
    "**": (4, operator.pow),
}
"""Precedence and function of each operator."""


def evaluate_arithmetic(text: str, variable: Callable[[str], int]) -> int:
    """The value of an expression; `variable` gives the value of a name."""
    tokens: list[str] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) == _MOST_TOKENS:
            raise ArithmeticTextError(f"{text[at : at + 20]!r} is not integer arithmetic")
        tokens.append(match[1])
        at = match.end()
    value, end = _expression(tokens, 0, 1, variable, 0)
    if end != len(tokens):
        raise ArithmeticTextError(f"{tokens[end]!r} is out of place")
    return value


def _expression(tokens: list[str], at: int, rank: int, variable: Callable[[str], int], depth: int) -> tuple[int, int]:
    """The value from `at` of operators that bind at least as tightly as `rank`, and where it ends."""
    left, at = _operand(tokens, at, variable, depth)
    while at < len(tokens) and tokens[at] in _OPERATORS and _OPERATORS[tokens[at]][0] >= rank:
        name, (binds, compute) = tokens[at], _OPERATORS[tokens[at]]
        # ** is right-associative; the others are left-associative.
        right, at = _expression(tokens, at + 1, binds + (name != "**"), variable, depth + 1)
        if name in ("**", "<<", ">>") and not 0 <= right <= 63:
            raise ArithmeticTextError("an exponent is too large")
        left = compute(left, right)
        if abs(left) >= _LARGEST:
            raise ArithmeticTextError("a number is too large")
    return left, at


def _operand(tokens: list[str], at: int, variable: Callable[[str], int], depth: int) -> tuple[int, int]:
    if at >= len(tokens) or depth > _MOST_NESTED:
        raise ArithmeticTextError("it ends early" if at >= len(tokens) else "it is nested too deeply")
    token = tokens[at]
    if token in "+-":
        value, at = _operand(tokens, at + 1, variable, depth + 1)
        return (-value if token == "-" else value), at
    if token == "(":
        value, at = _expression(tokens, at + 1, 1, variable, depth + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise ArithmeticTextError("a parenthesis is not closed")
        return value, at + 1
    if token.isdigit():
        if len(token) > 19:
            raise ArithmeticTextError("a number is too large")
        return int(token, 8 if re.fullmatch(r"0[0-7]+", token) else 10), at + 1
    if token.isidentifier():
        return variable(token), at + 1
    raise ArithmeticTextError(f"{token!r} is out of place")
