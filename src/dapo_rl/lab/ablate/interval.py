"""Mean over seeds with Student's t interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
INTERVAL = f"{CONFIDENCE:.0%} Student's t interval over seeds"


@dataclass(frozen=True, slots=True)
class TInterval:
    mean: float
    half_width: float | None
    """None for a single value."""
    n: int


def t_interval(values: Sequence[float]) -> TInterval | None:
    if not values:
        return None
    if len(values) == 1:
        return TInterval(values[0], None, 1)
    error = stdev(values) / math.sqrt(len(values))
    return TInterval(fmean(values), t_quantile(len(values) - 1) * error, len(values))


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
