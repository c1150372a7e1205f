"""Integer arithmetic of the shell, `$((1024 * 8))`, without running a shell."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|\*\*|<<|>>|[-+*/%()])")
_RANKS = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3, "%": 3, "**": 4}
_MOST_TOKENS, _MOST_NESTED = 1000, 50
_LARGEST = 2**63


class ArithmeticTextError(ValueError):
    """Not integer arithmetic that this evaluates."""


def evaluate_arithmetic(text: str, variable: Callable[[str], int]) -> int:
    """The value of an expression; `variable` gives the value of a name."""
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) == _MOST_TOKENS:
            raise ArithmeticTextError(f"{text[at : at + 20]!r} is not integer arithmetic")
        tokens.append(match[1])
        at = match.end()
    value, rest = _expression(tokens, 0, 1, variable, 0)
    if rest != len(tokens):
        raise ArithmeticTextError(f"{tokens[rest]!r} is out of place")
    return value


def _expression(tokens: list[str], at: int, rank: int, variable: Callable[[str], int], depth: int) -> tuple[int, int]:
    """The value from `at` of operators that bind at least as tightly as `rank`, and where it ends."""
    left, at = _operand(tokens, at, variable, depth)
    while at < len(tokens) and _RANKS.get(tokens[at], 0) >= rank:
        operator = tokens[at]
        # ** is right-associative; the others are left-associative.
        above = _RANKS[operator] + (operator != "**")
        right, at = _expression(tokens, at + 1, above, variable, depth + 1)
        left = _apply(operator, left, right)
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


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%") and right == 0:
        raise ArithmeticTextError("division by zero")
    if operator in ("**", "<<", ">>") and not 0 <= right <= 63:
        raise ArithmeticTextError("an exponent is too large")
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if operator in ("/", "%") else 0
    operations: dict[str, Callable[[], int]] = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: quotient,  # towards zero, as in C
        "%": lambda: left - quotient * right,
        "**": lambda: int(left**right),
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
    }
    value = operations[operator]()
    if abs(value) >= _LARGEST:
        raise ArithmeticTextError("a number is too large")
    return value
