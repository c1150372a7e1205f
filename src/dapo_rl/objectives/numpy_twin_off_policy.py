"""The NumPy counterparts of importance weights, rejection and off-policy masks: loops over samples and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dapo_rl.objectives.numpy_twin_tokens import BOUND, Array, as_matrices


def importance_ratio(
    proximal_logps: ArrayLike, behaviour_logps: ArrayLike, mask: ArrayLike | None = None, level: str = "token"
) -> Array:
    if level not in ("token", "sequence"):
        raise ValueError(f"unknown importance level {level!r}")
    proximal, behaviour, _, counted = as_matrices(proximal_logps, behaviour_logps, 0.0, mask)
    ratios = np.ones_like(proximal)
    for row, of_sample, kept in zip(ratios, proximal - behaviour, counted, strict=True):
        logs = of_sample[kept] if level == "token" else of_sample[kept].sum()
        row[kept] = np.exp(np.minimum(np.maximum(logs, -BOUND), BOUND))
    return ratios.reshape(np.shape(np.asarray(proximal_logps)))


def importance_weights(
    proximal_logps: ArrayLike,
    behaviour_logps: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    cap: float,
    floor: float = 0.0,
    mode: str = "truncate",
    level: str = "token",
) -> Array:
    if mode not in ("truncate", "mask"):
        raise ValueError(f"unknown importance mode {mode!r}")
    weights = importance_ratio(proximal_logps, behaviour_logps, mask, level)
    counted = np.broadcast_to(True if mask is None else np.asarray(mask, bool), weights.shape)
    bounded = np.clip(weights, floor, cap) if mode == "truncate" else weights * (floor <= weights) * (weights <= cap)
    return np.where(counted, bounded, 1.0)


def above_cap(
    proximal_logps: ArrayLike, behaviour_logps: ArrayLike, mask: ArrayLike, cap: float, level: str = "token"
) -> Array:
    return np.asarray(mask, bool) & (importance_ratio(proximal_logps, behaviour_logps, mask, level) > cap)


def off_policy_mask(
    new_logps: ArrayLike, behaviour_logps: ArrayLike, advantages: ArrayLike, mask: ArrayLike, threshold: float
) -> Array:
    new, behaviour, advantage, counted = as_matrices(new_logps, behaviour_logps, advantages, mask)
    masked = np.zeros(new.shape, bool)
    for i, t in zip(*np.nonzero(counted), strict=True):
        masked[i, t] = advantage[i, t] < 0 and (behaviour - new)[i, counted[i]].mean() > threshold
    return masked.reshape(np.shape(np.asarray(new_logps)))


def weight_scale(weights: ArrayLike) -> float:
    w = np.asarray(weights, float)
    return float(w.size / w.sum()) if w.sum() > 1e-8 * w.size else 1.0


def effective_sample_size(weights: ArrayLike) -> float:
    """Kish's: `(Σ w)² / (n Σ w²)`."""
    w = np.asarray(weights, float)
    return float(w.sum() ** 2 / (w.size * (w @ w))) if w.any() else 0.0


def chi_squared(ratios: ArrayLike) -> float:
    r = np.asarray(ratios, float)
    return float(sum(value * value - 1 for value in r) / r.size)


def rejected_tokens(
    proximal_logps: ArrayLike, behaviour_logps: ArrayLike, mask: ArrayLike, bounds: dict[str, Any]
) -> Array:
    proximal, behaviour, _, counted = as_matrices(proximal_logps, behaviour_logps, 0.0, mask)
    rejected = np.zeros(proximal.shape, bool)
    for row, of_sample, kept in zip(rejected, proximal - behaviour, counted, strict=True):
        if not kept.any():
            continue
        logs = np.minimum(np.maximum(of_sample[kept], -BOUND), BOUND)
        for name, bound in bounds.items():
            if name == "token":
                row[kept] |= (np.exp(logs) < bound[0]) | (np.exp(logs) > bound[1])
            elif name == "geometric":
                row[kept] |= not bound[0] <= np.exp(np.mean(logs)) <= bound[1]
            elif name == "product":
                total = min(max(of_sample[kept].sum(), -BOUND), BOUND)
                row[kept] |= not bound[0] <= np.exp(total) <= bound[1]
            elif name == "k3":
                row[kept] |= np.mean(np.exp(np.minimum(of_sample[kept], BOUND)) - 1 - of_sample[kept]) > bound
            elif name == "veto":
                row[kept] |= np.exp(logs).min() < bound
            else:
                raise ValueError(f"unknown statistic {name!r}")
    return rejected.reshape(np.shape(np.asarray(mask)))
