"""Coefficients that follow a measurement, so that it stays near a target."""

from __future__ import annotations


def next_entropy_coef(coef: float, entropy: float, target: float, *, delta: float, highest: float) -> float:
    """A step up if the entropy is at most the target, otherwise a step down, within [0, highest] (Skywork-OR1)."""
    return min(coef + delta, highest) if entropy <= target else max(coef - delta, 0.0)


def applied_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """The coefficient if the entropy measured last is at most the target, otherwise 0."""
    return coef if entropy <= target else 0.0
