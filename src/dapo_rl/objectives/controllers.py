"""Coefficients that follow a measurement, so that it stays near a target."""

from __future__ import annotations


def next_entropy_coef(coef: float, entropy: float, target: float, *, delta: float, highest: float) -> float:
    """A step up if the entropy is at most the target, otherwise a step down, within [0, highest] (Skywork-OR1)."""
    return min(coef + delta, highest) if entropy <= target else max(coef - delta, 0.0)


def next_kl_coef(coef: float, kl: float, target: float, *, samples: int, horizon: float) -> float:
    """`coef · (1 + clip(kl / target − 1, −0.2, 0.2) · samples / horizon)`, PPO's controller (Ziegler et al., 2019).
    More samples than the horizon count as many as it, so that the coefficient stays above 0."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * min(samples, horizon) / horizon)


def applied_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """The coefficient if the entropy measured last is at most the target, otherwise 0."""
    return coef if entropy <= target else 0.0
