"""The pass rates of a scored data set, and the window of those that are trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.config import DataSettings, Window
from dapo_rl.data.rows import MISSING, BadRow, BadRowError, Row, column
from dapo_rl.errors import UserError


def is_outside(row: Row, settings: DataSettings) -> bool:
    """Whether a row's pass rate is outside `data.pass_rate`. Raises BadRowError for a row without one, and UserError
    for a column that has something else."""
    if settings.pass_rate is None:
        return False
    name, (low, high) = settings.pass_rate_key, settings.pass_rate
    value = _given(row, name)
    if value is None:
        raise BadRowError(f"no pass rate in {name!r} (data.pass_rate_key); it has {', '.join(row.columns)}")
    rate = _number(value)
    if rate is None or not 0 <= rate <= 1:
        raise UserError(
            f"data.pass_rate_key: {row.where}: {name!r} is {shown(value)}, not a pass rate from 0 to 1; name a column "
            "with pass rates, or divide it by the number of samples"
        )
    return not low <= rate <= high


def _given(row: Row, name: str) -> Any:
    """None if it is missing, which is NaN in a column of pandas."""
    value = column(row.columns, name)
    return None if value is MISSING or (isinstance(value, float) and math.isnan(value)) else value


def _number(value: Any) -> float | None:
    """A number, or a text with one; `3/8` is 3 of 8 samples."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= 1 else math.inf  # an integer may have any number of digits
    if not isinstance(value, str):
        return None
    right, slash, samples = value.partition("/")
    try:
        rate = float(right) / float(samples) if slash else float(right)
    except (ValueError, ZeroDivisionError):
        return None
    return rate if math.isfinite(rate) else None


def check_scored(key: str, source: str, rows: Iterable[Row | BadRow], settings: DataSettings) -> None:
    """Raises a UserError if no row has a pass rate although `data.pass_rate` needs one."""
    good = [row for row in rows if isinstance(row, Row)]
    name = settings.pass_rate_key
    if settings.pass_rate is None or not good:
        return
    if all(_given(row, name) is None for row in good):
        what = f"{key}: {source}" if source else key
        raise UserError(
            f"data.pass_rate: {what} has no column {name!r}; `dapo eval MODEL --data {source or 'FILE'} --scores "
            f"scored.parquet` writes one, or data.pass_rate_key names another of {', '.join(good[0].columns)}"
        )


def window_text(window: Window) -> str:
    return f"{window[0]:g}–{window[1]:g}"
