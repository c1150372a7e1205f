"""Integer arithmetic of the shell, `$((1024 * 8))`: the grammar is Python's, and so is the precedence."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_TEXT = re.compile(r"[\w\s+\-*/%()<>]{1,4000}", re.ASCII)
_OCTAL = re.compile(r"\b0+(?=[0-7]+\b)")
_LARGEST = 2**63


class ArithmeticTextError(ValueError):
    """Not integer arithmetic that this evaluates."""


def _quotient(left: int, right: int) -> int:
    """Rounds towards zero, as in C."""
    if right == 0:
        raise ArithmeticTextError("division by zero")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - _quotient(left, right) * right,
    ast.Pow: operator.pow,
}


def evaluate_arithmetic(text: str, variable: Callable[[str], int]) -> int:
    """The value of an expression; `variable` gives the value of a name."""
    words = _OCTAL.sub("0o", " ".join(text.split()))
    try:
        if not _TEXT.fullmatch(words):
            raise SyntaxError
        return _value(ast.parse(words, mode="eval").body, variable)
    except (SyntaxError, RecursionError, MemoryError):
        raise ArithmeticTextError(f"{words[:20]!r} is not integer arithmetic") from None


def _value(node: ast.expr, variable: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            value = number
        case ast.Name(id=name):
            value = variable(name)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Pow):
                raise SyntaxError  # the shell applies the sign before the power
            value = _value(operand, variable) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            first, second = _value(left, variable), _value(right, variable)
            if isinstance(kind, ast.Pow | ast.LShift | ast.RShift) and not 0 <= second <= 63:
                raise ArithmeticTextError("an exponent is too large")
            value = _OPERATORS[type(kind)](first, second)
        case _:
            raise SyntaxError
    if abs(value) >= _LARGEST:
        raise ArithmeticTextError("a number is too large")
    return value
