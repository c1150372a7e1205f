"""Further counterparts of `numpy_twin`: losses without a clipped ratio, and the selection of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

BOUND = 20
"""Bound of a log-ratio before it is exponentiated."""


def as_matrices(
    new_logps: ArrayLike, old_logps: ArrayLike, advantages: ArrayLike, mask: ArrayLike | None
) -> tuple[Array, Array, Array, Array]:
    new, old = np.atleast_2d(np.asarray(new_logps, float)), np.atleast_2d(np.asarray(old_logps, float))
    advantage = np.asarray(advantages, float)
    if advantage.ndim == 1 and np.ndim(new_logps) == 2:
        advantage = advantage[:, None]
    counted = np.ones_like(new, bool) if mask is None else np.broadcast_to(np.asarray(mask, bool), new.shape)
    return new, old, np.broadcast_to(advantage, new.shape), counted


def sapo_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **bounds: Any,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for i, t in zip(*np.nonzero(counted), strict=True):
        r, a = np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), advantage[i, t]
        tau = tau_pos if a > 0 else tau_neg
        # sigmoid(x) = (1 + tanh(x / 2)) / 2
        losses[i, t] = -2 / tau * (1 + np.tanh(tau * (r - 1) / 2)) * a
    return losses


def gmpo_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for i, written in enumerate(counted):
        logs = []
        for t in np.flatnonzero(written):
            x, sign = new[i, t] - old[i, t], np.sign(advantage[i, t])
            logs.append(sign * min(sign * x, sign * min(max(x, -clip_low), clip_high)))
        mean = np.exp(np.clip(np.mean(logs), -BOUND, BOUND)) if logs else 0.0
        losses[i, written] = -advantage[i, written] * mean
    return losses


def bounded_log_ratio(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    return np.where(counted, 1 + new - old, 1.0)


def probability_change(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    return np.where(counted, 1 + np.exp(new) - np.exp(old), 1.0)


def binary_divergence(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    result = np.ones_like(new)
    for place in zip(*np.nonzero(counted), strict=True):
        p, q = np.exp(min(old[place], 0)), np.exp(min(new[place], 0))
        kl = p * np.log(p / q) + (1 - p) * np.log((1 - p + 1e-8) / (1 - q + 1e-8))
        result[place] = 1 + np.sign(q - p) * kl
    return result


def dppo_tv_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Array:
    moved = probability_change(new_logps, old_logps, mask) - 1
    return _within(moved, new_logps, old_logps, advantages, mask, clip_low, clip_high, clip_ratio_c)


def dppo_kl_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Array:
    moved = binary_divergence(new_logps, old_logps, mask) - 1
    return _within(moved, new_logps, old_logps, advantages, mask, clip_low, clip_high, clip_ratio_c)


def _within(
    moved: Array,
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for place in zip(*np.nonzero(counted), strict=True):
        a = advantage[place]
        too_far = moved[place] > clip_high if a > 0 else moved[place] < -clip_low
        weight = np.exp(np.clip(new[place] - old[place], -BOUND, BOUND))
        weight = weight if clip_ratio_c is None else min(weight, clip_ratio_c)
        losses[place] = 0.0 if too_far else -weight * a * new[place]
    return losses


def clip_cov_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    cov_mask: ArrayLike | None = None,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    left_out = np.zeros_like(counted) if cov_mask is None else np.asarray(cov_mask, bool)
    losses = np.zeros_like(new)
    for place in zip(*np.nonzero(counted & ~left_out), strict=True):
        r, a = np.exp(np.clip(new[place] - old[place], -BOUND, BOUND)), advantage[place]
        losses[place] = max(-a * r, -a * min(max(r, 1 - clip_low), 1 + clip_high))
    return losses


def kl_cov_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    cov_mask: ArrayLike | None = None,
    kl_cov_coef: float = 1.0,
    **bounds: Any,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    held = np.zeros_like(counted) if cov_mask is None else np.asarray(cov_mask, bool)
    losses = np.zeros_like(new)
    for place in zip(*np.nonzero(counted), strict=True):
        x = new[place] - old[place]
        losses[place] = -np.exp(np.clip(x, -BOUND, BOUND)) * advantage[place] + kl_cov_coef * abs(x) * held[place]
    return losses


def kept_logps(logits: ArrayLike, tokens: ArrayLike, kept_ids: ArrayLike) -> tuple[Array, Array]:
    """The log-probability of each token, and the entropy, of the softmax over the ids that were kept (−1: none)."""
    rows, kept = np.asarray(logits, float), np.asarray(kept_ids, int)
    logps, entropy = np.zeros(len(rows)), np.zeros(len(rows))
    for t, token in enumerate(np.asarray(tokens, int)):
        ids = [i for i in kept[t] if i >= 0]
        if ids:
            weights = {i: np.exp(rows[t, i] - max(rows[t, ids])) for i in ids}
            total = sum(weights.values())
            logps[t] = np.log(weights[token] / total)
            entropy[t] = -sum(w / total * np.log(w / total) for w in weights.values() if w > 0)
    return logps, entropy


def top_entropy_mask(entropy: ArrayLike, mask: ArrayLike, share: float) -> Array:
    values, counted = np.asarray(entropy, float), np.asarray(mask, bool)
    if not counted.any():
        return counted
    return np.asarray(counted & (values >= np.quantile(values[counted], 1 - share)))


def token_covariances(logps: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> Array:
    x, a, counted = np.asarray(logps, float), np.asarray(advantages, float), np.asarray(mask, bool)
    result = np.zeros_like(x)
    for place in np.flatnonzero(counted):
        result[place] = (x[place] - x[counted].mean()) * (a[place] - a[counted].mean())
    return result


def clip_cov_mask(
    covariances: ArrayLike, mask: ArrayLike, order: ArrayLike, *, share: float, low: float, high: float
) -> Array:
    values, counted, keys = np.asarray(covariances, float), np.asarray(mask, bool), np.asarray(order, float)
    candidates = [t for t in range(len(values)) if counted[t] and low < values[t] < high]
    first = sorted(candidates, key=lambda t: keys[t])[: max(int(share * counted.sum()), 1)]
    return np.isin(np.arange(len(values)), first)


def kl_cov_mask(covariances: ArrayLike, mask: ArrayLike, *, share: float) -> Array:
    values, counted = np.asarray(covariances, float), np.asarray(mask, bool)
    candidates = sorted(np.flatnonzero(counted), key=lambda t: -values[t])
    return np.isin(np.arange(len(values)), candidates[: max(int(share * counted.sum()), 1)])
