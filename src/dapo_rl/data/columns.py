"""Looks up the columns of a row by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = object()


def column(columns: Mapping[str, Any], key: str) -> Any:
    """The column of that name, or the nested field that a dotted name addresses; a field's own name may have dots."""
    if key in columns:
        return columns[key]
    parts = key.split(".")
    for end in range(1, len(parts)):
        inner = columns.get(".".join(parts[:end]))
        if isinstance(inner, Mapping) and (found := column(inner, ".".join(parts[end:]))) is not MISSING:
            return found
    return MISSING
