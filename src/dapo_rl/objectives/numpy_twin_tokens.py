"""Counterparts of the losses of tokens, and of the selection of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

BOUND = 20
"""Bound of a log-ratio before it is exponentiated."""


class ReferenceClipFractions(NamedTuple):
    high: float
    low: float
    dual: float


def as_matrices(
    new_logps: ArrayLike, old_logps: ArrayLike, advantages: ArrayLike, mask: ArrayLike | None
) -> tuple[Array, Array, Array, Array]:
    new, old = np.atleast_2d(np.asarray(new_logps, float)), np.atleast_2d(np.asarray(old_logps, float))
    advantage = np.asarray(advantages, float)
    if advantage.ndim == 1 and np.ndim(new_logps) == 2:
        advantage = advantage[:, None]
    counted = np.ones_like(new, bool) if mask is None else np.broadcast_to(np.asarray(mask, bool), new.shape)
    return new, old, np.broadcast_to(advantage, new.shape), counted


def for_each_sample(formula: Callable[..., ArrayLike]) -> Callable[..., Array]:
    """Turns a formula for the tokens of a sample, of their new and old log-probabilities and their advantages, into
    `losses(new_logps, old_logps, advantages, mask=None, **settings)` of all samples, `[B, T]`."""

    @wraps(formula)
    def losses(
        new_logps: ArrayLike,
        old_logps: ArrayLike,
        advantages: ArrayLike,
        mask: ArrayLike | None = None,
        **settings: Any,
    ) -> Array:
        new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
        result = np.zeros_like(new)
        for i, written in enumerate(counted):
            if written.any():
                result[i, written] = formula(new[i, written], old[i, written], advantage[i, written], **settings)
        return result

    return losses


def for_each_token(formula: Callable[..., float]) -> Callable[..., Array]:
    """As `for_each_sample`, by a formula for one token."""

    @for_each_sample
    @wraps(formula)
    def losses(new: Array, old: Array, a: Array, **settings: Any) -> list[float]:
        return [formula(*token, **settings) for token in zip(new, old, a, strict=True)]

    return losses


def _ratio(new: float, old: float) -> float:
    return float(np.exp(np.clip(new - old, -BOUND, BOUND)))


def _clipped(r: float, a: float, clip_low: float, clip_high: float) -> float:
    """Each sign of the advantage has one bound: the upper one limits reinforcement, the lower one suppression."""
    return min(r, 1 + clip_high) * a if a >= 0 else max(r, 1 - clip_low) * a


@for_each_token
def policy_token_losses(
    new: float, old: float, a: float, *, clip_low: float, clip_high: float, clip_ratio_c: float | None = None
) -> float:
    r = _ratio(new, old)
    objective = _clipped(r, a, clip_low, clip_high)
    if clip_ratio_c is not None and a < 0:
        objective = max(objective, clip_ratio_c * a)
    return -objective


@for_each_token
def cispo_losses(new: float, old: float, a: float, *, clip_low: float, clip_high: float) -> float:
    return -min(max(_ratio(new, old), 1 - clip_low), 1 + clip_high) * a * new


@for_each_token
def sapo_losses(new: float, old: float, a: float, *, tau_pos: float = 1.0, tau_neg: float = 1.05, **_: Any) -> float:
    tau = tau_pos if a > 0 else tau_neg
    # sigmoid(x) = (1 + tanh(x / 2)) / 2
    return float(-2 / tau * (1 + np.tanh(tau * (_ratio(new, old) - 1) / 2)) * a)


@for_each_token
def dppo_tv_losses(
    new: float, old: float, a: float, *, clip_low: float, clip_high: float, clip_ratio_c: float | None = None
) -> float:
    moved = np.exp(new) - np.exp(old)
    return _within(moved, clip_low, clip_high, a) * -min(_ratio(new, old), clip_ratio_c or np.inf) * a * new


@for_each_token
def dppo_kl_losses(
    new: float, old: float, a: float, *, clip_low: float, clip_high: float, clip_ratio_c: float | None = None
) -> float:
    moved = _signed_divergence(new, old)
    return _within(moved, clip_low, clip_high, a) * -min(_ratio(new, old), clip_ratio_c or np.inf) * a * new


def _within(moved: float, clip_low: float, clip_high: float, a: float) -> bool:
    """Whether a token has not moved too far in the direction of its advantage."""
    return moved <= clip_high if a > 0 else moved >= -clip_low


def _signed_divergence(new: float, old: float) -> float:
    p, q = np.exp(min(old, 0)), np.exp(min(new, 0))
    kl = p * np.log(p / q) + (1 - p) * np.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return float(np.sign(q - p) * kl)


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
    losses = policy_token_losses(new_logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return losses if cov_mask is None else np.where(cov_mask, 0.0, losses)


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
    losses = -np.exp(np.clip(new - old, -BOUND, BOUND)) * advantage + kl_cov_coef * np.abs(new - old) * held
    return np.where(counted, losses, 0.0)


def sequence_ratio(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    ratio = np.ones_like(new)
    for i, written in enumerate(counted):
        if written.any():
            ratio[i, written] = np.exp(np.clip((new[i, written] - old[i, written]).mean(), -BOUND, BOUND))
    return ratio


@for_each_sample
def gspo_losses(new: Array, old: Array, a: Array, *, clip_low: float, clip_high: float) -> list[float]:
    s = np.exp(np.clip((new - old).mean(), -BOUND, BOUND))
    return [-_clipped(s, of_token, clip_low, clip_high) for of_token in a]


def gspo_token_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    moved_logps: ArrayLike | None = None,
) -> Array:
    """The ratio of a token is s · π(moved) / π(new), whose derivative at `moved = new` is the gradient of the loss; its
    value there is that of `gspo_losses`."""
    new, _, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    moved = new if moved_logps is None else np.atleast_2d(np.asarray(moved_logps, float))
    losses = np.zeros_like(new)
    ratio = sequence_ratio(new_logps, old_logps, mask)
    for i, t in zip(*np.nonzero(counted), strict=True):
        r, a = ratio[i, t] * np.exp(moved[i, t] - new[i, t]), advantage[i, t]
        losses[i, t] = -min(r * a, min(max(r, 1 - clip_low), 1 + clip_high) * a)
    return losses


@for_each_sample
def gmpo_losses(new: Array, old: Array, a: Array, *, clip_low: float, clip_high: float) -> Array:
    x, sign = new - old, np.sign(a)
    logs = sign * np.minimum(sign * x, sign * np.clip(x, -clip_low, clip_high))
    return np.asarray(-a * np.exp(np.clip(logs.mean(), -BOUND, BOUND)))


def probability_ratio(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    return np.where(counted, np.exp(np.clip(np.where(counted, new - old, 0.0), -BOUND, BOUND)), 1.0)


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
        result[place] = 1 + _signed_divergence(new[place], old[place])
    return result


def clip_fractions(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_ratio_c: float | None = None,
) -> ReferenceClipFractions:
    clipped = clipped_tokens(
        new_logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c
    )
    *_, counted = as_matrices(new_logps, old_logps, advantages, mask)
    return ReferenceClipFractions(*(tokens.sum() / max(counted.sum(), 1) for tokens in clipped))


def clipped_tokens(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
    per_sequence: bool = False,
) -> tuple[Array, Array, Array]:
    *_, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    ratio = (sequence_ratio if per_sequence else probability_ratio)(new_logps, old_logps, mask)
    high, low, dual = (np.zeros(counted.shape, bool) for _ in range(3))
    for place in zip(*np.nonzero(counted), strict=True):
        r, a = ratio[place], advantage[place]
        high[place] = a > 0 and r > 1 + clip_high
        low[place] = a < 0 and r < 1 - clip_low
        dual[place] = a < 0 and clip_ratio_c is not None and r > clip_ratio_c
    return high, low, dual


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
