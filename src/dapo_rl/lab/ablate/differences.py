"""The difference between two arms: its interval, its size, and what the runs could have detected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from dapo_rl.lab.ablate.interval import CONFIDENCE, FEWEST, all_equal, t_quantile

POWER = 0.8


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """A mean difference, paired by seed. For fewer than three pairs, or if all are equal, there is no interval."""

    mean: float
    half_width: float | None
    """Of the 95 % interval of this difference alone."""
    n: int
    low: float
    """The smallest of the differences."""
    high: float
    """The largest."""
    comparisons: int = 1
    """How many differences are reported together."""
    corrected_half_width: float | None = None
    """Of the interval with Bonferroni's correction: with 95 % probability all intervals of the report cover theirs."""
    effect_size: float | None = None
    """Cohen's d of paired values: the mean in standard deviations of the differences."""
    detectable: float | None = None
    """The smallest true difference that the corrected test finds with a probability of 80 %."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the corrected interval leaves 0 out."""
        return self.corrected_half_width is not None and abs(self.mean) > self.corrected_half_width


def paired_difference(
    own: Mapping[int, float], other: Mapping[int, float], comparisons: int = 1
) -> SeedDifference | None:
    """The difference own − other of the values by seed, over the seeds that both have.

    Runs with the same seed share prompts and random numbers, so pairing cancels common noise.
    """
    pairs = [own[seed] - other[seed] for seed in own if seed in other]
    if not pairs:
        return None
    low, high = min(pairs), max(pairs)
    if len(pairs) < FEWEST or all_equal(pairs):
        return SeedDifference(fmean(pairs), None, len(pairs), low, high, comparisons)
    freedom = len(pairs) - 1
    mean, deviation = fmean(pairs), stdev(pairs)
    error = deviation / math.sqrt(len(pairs))
    corrected = t_quantile(freedom, 1 - (1 - CONFIDENCE) / comparisons)
    return SeedDifference(
        mean=mean,
        half_width=t_quantile(freedom) * error,
        n=len(pairs),
        low=low,
        high=high,
        comparisons=comparisons,
        corrected_half_width=corrected * error,
        effect_size=mean / deviation,
        detectable=detectable_errors(freedom, corrected) * error,
    )


def detectable_errors(freedom: int, critical: float, power: float = POWER) -> float:
    """The true difference, in standard errors, that a two-sided t test finds with this probability."""
    low, high = 0.0, 1.0
    while power_of_test(high, freedom, critical) < power:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of_test(middle, freedom, critical) < power else (low, middle)
    return (low + high) / 2


def power_of_test(errors: float, freedom: int, critical: float) -> float:
    """P(|T| > critical) for a true difference of so many standard errors: noncentral t, by Simpson's rule.

    The estimated standard deviation is s times the true one, where freedom · s² has the χ² distribution. Given s, the
    test compares a normal variable with ± critical · s.
    """
    widest, parts = 1 + 7 / math.sqrt(freedom), 400
    scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    total = 0.0
    for k in range(1, parts + 1):
        s = widest * k / parts
        density = math.exp(scale + (freedom - 1) * math.log(s) - freedom * s * s / 2)
        beyond = _upper_tail(critical * s - errors) + _upper_tail(critical * s + errors)
        total += density * beyond * (1 if k == parts else 4 if k % 2 else 2)
    if freedom == 1:  # the only density that is not 0 at 0, where the test always rejects
        total += math.exp(scale)
    return total * widest / parts / 3


def _upper_tail(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2
