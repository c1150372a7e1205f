"""The lengths of samples, drawn from a distribution: `fixed:256`, `lognormal:1000`, `uniform:10:500`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import exp, isfinite, log, sqrt
from random import Random
from statistics import NormalDist

from dapo_rl.errors import UserError

SIGMA = sqrt(2 * log(1.637))
"""About 0.993. The mean of a lognormal distribution is median × exp(σ² / 2), so here 1.637 times its median."""

FORMS = "fixed:N, lognormal:MEDIAN[:SIGMA] or uniform:LOW:HIGH"

Quantile = Callable[[float], float]
"""The length below which a share of all samples lies."""


def fixed_length(spec: str) -> int | None:
    """N of `fixed:N`; None for a distribution."""
    kind, numbers = _parse(spec)
    return int(numbers[0]) if kind == "fixed" else None


def longest_length(spec: str) -> int | None:
    """The upper bound of the distribution, if it has one."""
    kind, numbers = _parse(spec)
    return None if kind == "lognormal" else int(numbers[-1])


@lru_cache(maxsize=8)
def draw_lengths(spec: str, cap: int, prompts: int, group: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """For each prompt, the lengths of its samples: at least 1, at most `cap`.

    Only the generator's bits are used, so that the lengths do not depend on a library's version.
    """
    quantile, rng = _quantile(spec), Random(f"lengths {seed}")

    def one() -> int:
        share = (rng.getrandbits(52) + 0.5) / 2**52  # never 0 or 1
        return min(max(round(quantile(share)), 1), cap)

    return tuple(tuple(one() for _ in range(group)) for _ in range(prompts))


def _quantile(spec: str) -> Quantile:
    kind, numbers = _parse(spec)
    if kind == "fixed":
        return lambda share: numbers[0]
    if kind == "uniform":
        low, high = numbers
        return lambda share: low + int(share * (high - low + 1))
    median, sigma = numbers
    normal = NormalDist()
    return lambda share: median * exp(min(sigma * normal.inv_cdf(share), 700))


def _parse(spec: str) -> tuple[str, tuple[float, ...]]:
    kind, *words = spec.split(":")
    try:
        numbers = tuple(map(float, words))
    except ValueError:
        numbers = ()
    if kind == "lognormal" and len(numbers) == 1:
        numbers = (*numbers, SIGMA)
    whole = kind == "lognormal" or all(number.is_integer() for number in numbers)
    valid = len(numbers) == {"fixed": 1, "lognormal": 2, "uniform": 2}.get(kind) and whole
    if not valid or not all(map(isfinite, numbers)) or numbers[0] < 1 or numbers[-1] < 0:
        raise UserError(f"--lengths: {spec!r} is not {FORMS}")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise UserError(f"--lengths: in {spec!r} the highest length is below the lowest")
    return kind, numbers
