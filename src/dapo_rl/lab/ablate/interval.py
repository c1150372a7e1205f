"""Mean over seeds with Student's t interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
FEWEST = 3
"""With two values, Student's t is 12.7: the interval says nothing, and a chance agreement makes it narrow."""
INTERVAL = f"{CONFIDENCE:.0%} Student's t interval over seeds"


@dataclass(frozen=True, slots=True)
class TInterval:
    mean: float
    half_width: float | None
    """None for fewer than three values, and if all are equal."""
    n: int
    low: float
    """The smallest value."""
    high: float
    """The largest."""


def t_interval(values: Sequence[float]) -> TInterval | None:
    if not values:
        return None
    half_width = None
    if len(values) >= FEWEST and not all_equal(values):
        half_width = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return TInterval(fmean(values), half_width, len(values), min(values), max(values))


def all_equal(values: Sequence[float]) -> bool:
    """Up to rounding. Such values do not tell how much others would differ."""
    return math.isclose(min(values), max(values), rel_tol=1e-9, abs_tol=1e-12)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t such that Student's distribution has probability `confidence` within ±t."""
    low, high = 0.0, 1.0
    while _share_within(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _share_within(t: float, freedom: int) -> float:
    """Abramowitz and Stegun 26.7.3 and 26.7.4: a finite sum for integer degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
