"""Columns of a rollout table that the board does not know, such as what reward functions add: name and value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from dapo_rl.base.quote import cut
from dapo_rl.board.run_files import LARGEST_COUNT

MOST_COLUMNS, MOST_VALUES = 64, 200
LONGEST_VALUE = 2000


def is_showable(kind: pa.DataType) -> bool:
    """Whether values of a type are scalars, or mappings of names to them."""
    if pa.types.is_dictionary(kind):
        return is_showable(kind.value_type)
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)) or (
        pa.types.is_map(kind) or pa.types.is_struct(kind)
    )


def extras_of(table: pa.Table, names: Iterable[str]) -> list[dict[str, Any]]:
    """The values of each row by name; those of a mapping by `column.name`. Missing values are left out."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in names:
        for row, scalar in zip(rows, table.column(name), strict=True):
            for key, value in _named(name, _python(scalar)):
                if (shown := _plain(value)) is not None and len(row) < MOST_VALUES:
                    row[cut(key, LONGEST_VALUE)] = shown
    return rows


def _python(scalar: pa.Scalar) -> Any:
    try:
        if isinstance(scalar, pa.MapScalar) and scalar.is_valid:
            first = scalar.values.slice(0, MOST_VALUES).to_pylist()
            return [(entry["key"], entry["value"]) for entry in first]
        return scalar.as_py()
    except Exception:  # a date out of Python's range, text that is not UTF-8, …
        return None


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}.{key}", inner) for key, inner in value.items()]
    if isinstance(value, list):  # a map
        return [(f"{name}.{key}", inner) for key, inner in value]
    return [(name, value)]


def _plain(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, dict | list | tuple | bytes):
        return None
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= LARGEST_COUNT):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return cut(str(value), LONGEST_VALUE)
