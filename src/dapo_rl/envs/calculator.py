"""The built-in tool `calculator`."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1000
MAX_BITS = 8192
"""Size limit of whole numbers: about 2466 digits."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_HINTS: dict[type[ast.AST], str] = {
    ast.BitXor: "write ** for powers",
    ast.Tuple: "write numbers without commas",
    ast.Call: "there are no functions",
    ast.Name: "there are no names",
    ast.Compare: "there are no comparisons",
}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression, such as (12 + 3) * 4 ** 2 / 7.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.

    Returns:
        The value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(expression.strip(), mode="eval")
        return repr(_value(tree.body))
    except SyntaxError as error:
        raise ValueError(f"not an arithmetic expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None


calculator.deterministic = True  # type: ignore[attr-defined]


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
            _check_power(left, right)
        return _bounded(_BINARY[type(node.op)](left, right))
    what = node.op if isinstance(node, ast.BinOp | ast.UnaryOp) else node
    hint = _HINTS.get(type(what), "use numbers, + - * / // % ** and parentheses")
    raise ValueError(f"not an arithmetic expression: {hint}")


def _check_power(base: int, exponent: int) -> None:
    """Raises before a power is computed that is too large."""
    if abs(base) > 1 and exponent > 0 and (abs(base).bit_length() - 1) * exponent >= MAX_BITS:
        raise OverflowError


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise OverflowError
    number: Number = value
    return number
