"""Reads `algo.reject`: statistics with their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import REJECTIONS

KEY = "algo.reject"


def read_rejections(value: Any) -> dict[str, float | tuple[float, float]]:
    """Raises a ValueError of one line that names the key."""
    if value in (None, "none"):
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{KEY}: expected statistics with bounds, got {shown(value)}; for example {KEY}.k3=0.1")
    return {str(name): _bound(str(name), bound) for name, bound in value.items()}


def _bound(name: str, value: Any) -> float | tuple[float, float]:
    if name not in REJECTIONS:
        hint = did_you_mean(nearest(name, REJECTIONS))
        raise ValueError(f"{KEY}: {shown(name)} is not one of {', '.join(REJECTIONS)}{hint}")
    key, two_sided = f"{KEY}.{name}", REJECTIONS[name].two_sided  # type: ignore[index]
    is_list = isinstance(value, list | tuple)
    numbers = [_number(each) for each in (value if is_list else [value])]
    if len(numbers) != 1 + two_sided or is_list != two_sided or not all(map(math.isfinite, numbers)):
        wanted = "two bounds, [low, high]" if two_sided else "a number"
        raise ValueError(f"{key}: expected {wanted}, got {shown(value)}")
    low, high = numbers[0], numbers[-1]
    if two_sided and not 0 <= low < high:
        raise ValueError(f"{key}: [{low:g}, {high:g}] is no range of ratios; an on-policy ratio is 1, as in [0.5, 2]")
    if not two_sided and low <= 0:
        raise ValueError(f"{key}: {low:g} is not above 0; leave it out to turn it off")
    if name == "veto" and low >= 1:
        raise ValueError(f"{key}: {low:g} is not below 1, the ratio of an on-policy token; 0.0001 is usual")
    return (low, high) if two_sided else low


def _number(value: Any) -> float:
    """NaN if it is none. YAML reads 1e-4, without a point, as text."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
