"""The estimators of the KL divergence of `numpy_twin`, and their slopes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dapo_rl.objectives.numpy_twin_tokens import BOUND, Array


def kl_penalty(logps: ArrayLike, ref_logps: ArrayLike, kind: str = "k3") -> Array:
    log_ratio: Array = np.asarray(logps, float) - np.asarray(ref_logps, float)
    if kind in ("k1", "k1+"):
        return log_ratio
    if kind == "k2":
        return np.asarray(np.square(log_ratio) / 2)
    if kind in ("k3", "k3+"):
        log_ratio = np.maximum(log_ratio, -BOUND)
        return np.asarray(np.expm1(-log_ratio) + log_ratio)
    raise ValueError(f"unknown kl kind {kind!r}")


def kl_slope(logps: ArrayLike, ref_logps: ArrayLike, kind: str = "k3") -> Array:
    """The derivative of `kl_penalty` by `logps`."""
    log_ratio: Array = np.asarray(logps, float) - np.asarray(ref_logps, float)
    if kind == "k1":
        return np.ones_like(log_ratio)
    if kind == "k3":
        return np.where(log_ratio >= -BOUND, -np.expm1(-np.maximum(log_ratio, -BOUND)), 0.0)
    if kind in ("k2", "k1+", "k3+"):
        return log_ratio
    raise ValueError(f"unknown kl kind {kind!r}")


def unbiased_kl(logps: ArrayLike, ref_logps: ArrayLike, behaviour_logps: ArrayLike, kind: str = "k3") -> Array:
    log_ratio: Array = np.asarray(logps, float) - np.asarray(behaviour_logps, float)
    return np.asarray(np.exp(np.clip(log_ratio, -BOUND, BOUND)) * kl_penalty(logps, ref_logps, kind))


def unbiased_kl_slope(logps: ArrayLike, ref_logps: ArrayLike, behaviour_logps: ArrayLike, kind: str = "k3") -> Array:
    """The derivative of `unbiased_kl` by `logps`: that of a product."""
    log_ratio: Array = np.asarray(logps, float) - np.asarray(behaviour_logps, float)
    ratio = np.exp(np.clip(log_ratio, -BOUND, BOUND))
    moves = np.where(np.abs(log_ratio) <= BOUND, kl_penalty(logps, ref_logps, kind), 0.0)
    return np.asarray(ratio * (moves + kl_slope(logps, ref_logps, kind)))


def sample_means(values: ArrayLike, mask: ArrayLike) -> Array:
    counted, rows = np.asarray(mask, bool), np.asarray(values, float)
    return np.array([row[own].mean() if own.any() else 0.0 for row, own in zip(rows, counted, strict=True)])
