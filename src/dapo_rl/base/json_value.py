"""Values as JSON has them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """Null for NaN and infinities, plain numbers for scalars of any array library, and text for paths."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else json_value(float(value))
