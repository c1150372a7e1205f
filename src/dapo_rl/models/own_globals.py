"""Copies a function with globals of its own: other users of its file keep theirs."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any


def with_global(function: Any, name: str, value: Any) -> FunctionType | None:
    """A copy of the function that reads `value` as the global `name`. Decorators are copied too. None if the function
    does not read the global, or if a decorator does not keep the function that it wraps in its closure."""
    if not isinstance(function, FunctionType):
        return None
    namespace, closure = function.__globals__, function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        if name not in function.__code__.co_names:
            return None
        namespace = {**namespace, name: value}
    else:
        inner = with_global(wrapped, name, value)
        cells = closure or ()
        if inner is None or not any(cell.cell_contents is wrapped for cell in cells):
            return None
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
