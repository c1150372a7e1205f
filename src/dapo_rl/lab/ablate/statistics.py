"""Means over seeds with Student's t intervals, and paired differences between arms with exact intervals and power."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
FEWEST = 3
"""With two values, Student's t is 12.7: the interval says nothing, and a chance agreement makes it narrow."""
INTERVAL = f"{CONFIDENCE:.0%} Student's t interval over seeds"
POWER = 0.8
EXACT_UP_TO = 20
"""Up to this many seeds, exact intervals use all subsets of the differences, beyond it a random sample of them."""


@dataclass(frozen=True, slots=True)
class TInterval:
    mean: float
    half_width: float | None
    """None for fewer than three values, and if all are equal."""
    n: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SeedDifference(TInterval):
    """A mean difference, paired by seed; `half_width` is that of the 95 % interval of this difference alone."""

    comparisons: int = 1
    corrected_half_width: float | None = None
    """Of the interval with Bonferroni's correction: with 95 % probability all intervals of the report cover theirs."""
    effect_size: float | None = None
    """Cohen's d of paired values: the mean in standard deviations of the differences."""
    detectable: float | None = None
    """The smallest true difference that the corrected test finds with a probability of 80 %."""
    exact: tuple[float, float] | None = None
    """The corrected interval by sign flips, which assumes symmetry alone; None with too few values."""

    @property
    def excludes_zero(self) -> bool:
        return self.corrected_half_width is not None and abs(self.mean) > self.corrected_half_width


def t_interval(values: Sequence[float]) -> TInterval | None:
    if not values:
        return None
    half_width = None
    if len(values) >= FEWEST and not all_equal(values):
        half_width = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return TInterval(fmean(values), half_width, len(values), min(values), max(values))


def paired_difference(
    own: Mapping[int, float], other: Mapping[int, float], comparisons: int = 1
) -> SeedDifference | None:
    """The difference own − other of the values by seed, over the seeds that both have.

    Runs with the same seed share prompts and random numbers, so pairing cancels common noise.
    """
    pairs = [own[seed] - other[seed] for seed in own if seed in other]
    alone = t_interval(pairs)
    if alone is None:
        return None
    if alone.half_width is None:
        return SeedDifference(**asdict(alone), comparisons=comparisons)
    deviation, freedom = stdev(pairs), len(pairs) - 1
    error = deviation / math.sqrt(len(pairs))
    critical = t_quantile(freedom, 1 - (1 - CONFIDENCE) / comparisons)
    return SeedDifference(
        **asdict(alone),
        comparisons=comparisons,
        corrected_half_width=critical * error,
        effect_size=alone.mean / deviation,
        detectable=detectable_errors(freedom, critical) * error,
        exact=sign_flip_interval(pairs, 1 - (1 - CONFIDENCE) / comparisons),
    )


def sign_flip_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The centers that the exact sign-flip test of the mean does not reject, for values distributed symmetrically.

    Flipping the signs of a subset does not lower the mean of `values - center` exactly if the subset's mean is at most
    the center. The ends of the interval are therefore order statistics of the means of all subsets (Hartigan 1969). A
    random sample of subsets keeps the confidence. None if even the most extreme values would not be rejected.
    """
    import numpy as np

    count = 2 ** min(len(values), EXACT_UP_TO)
    tail = math.floor((1 - confidence) / 2 * count * (1 + 1e-12))  # of 2ⁿ subsets, with the empty one
    if tail < 1:
        return None
    if len(values) <= EXACT_UP_TO:
        sums, sizes = np.zeros(1), np.zeros(1)
        for value in values:
            sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + 1])
        means = sums[1:] / sizes[1:]
    else:
        rng = np.random.default_rng(0)
        sums, sizes = np.zeros(count - 1), np.zeros(count - 1)
        for value in values:
            chosen = rng.integers(2, size=count - 1)
            sums, sizes = sums + chosen * value, sizes + chosen
        means = np.where(sizes > 0, sums / np.maximum(sizes, 1), math.fsum(values) / len(values))
    means.sort()
    return float(means[tail - 1]), float(means[-tail])


def fewest_for_exact(comparisons: int = 1) -> int:
    """The fewest seeds with which an exact interval exists."""
    return math.ceil(math.log2(2 * comparisons / (1 - CONFIDENCE)) - 1e-9)


def all_equal(values: Sequence[float]) -> bool:
    """Up to rounding. Such values do not tell how much others would differ."""
    return math.isclose(min(values), max(values), rel_tol=1e-9, abs_tol=1e-12)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t such that Student's distribution has probability `confidence` within ±t."""
    return _solve(lambda t: _share_within(t, freedom), confidence)


def _share_within(t: float, freedom: int) -> float:
    from mpmath import betainc  # takes a tenth of a second to import

    return float(betainc(0.5, freedom / 2, 0, t * t / (freedom + t * t), regularized=True))


def detectable_errors(freedom: int, critical: float, power: float = POWER) -> float:
    """The true difference, in standard errors, that a two-sided t test finds with this probability."""
    return _solve(lambda errors: power_of_test(errors, freedom, critical), power)


def _solve(increasing: Callable[[float], float], value: float) -> float:
    """Where an increasing function of a positive number has this value, by bisection."""
    low, high = 0.0, 1.0
    while increasing(high) < value:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < value else (low, middle)
    return (low + high) / 2


def power_of_test(errors: float, freedom: int, critical: float) -> float:
    """P(|T| > critical) for a true difference of `errors` standard errors: noncentral t, by Simpson's rule.

    The estimated standard deviation is s times the true one, where freedom · s² has the χ² distribution. Given s, the
    test compares a normal variable with ± critical · s.
    """
    widest, parts = 1 + 7 / math.sqrt(freedom), 400
    scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    normal, total = NormalDist(), 0.0
    for k in range(1, parts + 1):
        s = widest * k / parts
        density = math.exp(scale + (freedom - 1) * math.log(s) - freedom * s * s / 2)
        beyond = normal.cdf(errors - critical * s) + normal.cdf(-errors - critical * s)
        total += density * beyond * (1 if k == parts else 4 if k % 2 else 2)
    if freedom == 1:  # the only density that is not 0 at 0, where the test always rejects
        total += math.exp(scale)
    return total * widest / parts / 3
