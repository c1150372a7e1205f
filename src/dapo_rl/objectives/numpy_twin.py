"""The same functions in plain NumPy: a readable specification, and the oracle for the tests.

Computes in float64, with loops where they are clearer; shares no code with the PyTorch functions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dapo_rl.objectives.numpy_twin_credit import (
    Array,
    adaptive_lambda,
    decoupled_gae,
    distilled,
    gae,
    gdpo_advantages,
    group_advantages,
    no_advantages,
    opo_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rewards_alone,
    token_rewards,
    whitened,
)
from dapo_rl.objectives.numpy_twin_kl import kl_penalty, kl_slope, sample_means, unbiased_kl, unbiased_kl_slope
from dapo_rl.objectives.numpy_twin_off_policy import (
    above_cap,
    chi_squared,
    effective_sample_size,
    importance_ratio,
    importance_weights,
    off_policy_mask,
    rejected_tokens,
    weight_scale,
)
from dapo_rl.objectives.numpy_twin_tokens import (
    BOUND,
    as_matrices,
    binary_divergence,
    bounded_log_ratio,
    clip_cov_losses,
    clip_cov_mask,
    dppo_kl_losses,
    dppo_tv_losses,
    gmpo_losses,
    kl_cov_losses,
    kl_cov_mask,
    probability_change,
    sapo_losses,
    token_covariances,
    top_entropy_mask,
)

__all__ = [
    "ReferenceClipFractions",
    "above_cap",
    "adaptive_lambda",
    "aggregate",
    "binary_divergence",
    "bounded_log_ratio",
    "chi_squared",
    "cispo_losses",
    "clip_cov_losses",
    "clip_cov_mask",
    "clip_fractions",
    "clipped_tokens",
    "dapo_policy_loss",
    "decoupled_gae",
    "distilled",
    "dppo_kl_losses",
    "dppo_tv_losses",
    "dynamic_sampling_filter",
    "effective_sample_size",
    "entropy_from_logits",
    "explained_variance",
    "gae",
    "gdpo_advantages",
    "gmpo_losses",
    "group_advantages",
    "gspo_losses",
    "gspo_token_losses",
    "importance_ratio",
    "importance_weights",
    "kl_cov_losses",
    "kl_cov_mask",
    "kl_penalty",
    "kl_slope",
    "no_advantages",
    "off_policy_mask",
    "opo_advantages",
    "overlong_reward_shaping",
    "policy_token_losses",
    "positive_lm_loss",
    "probability_change",
    "probability_ratio",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rejected_tokens",
    "rewards_alone",
    "sample_means",
    "sapo_losses",
    "sequence_ratio",
    "soft_overlong_punishment",
    "token_covariances",
    "token_rewards",
    "top_entropy_mask",
    "unbiased_kl",
    "unbiased_kl_slope",
    "value_loss",
    "weight_scale",
    "whitened",
]


class ReferenceClipFractions(NamedTuple):
    high: float
    low: float
    dual: float


def dapo_policy_loss(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_ratio_c: float | None = None,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    group_tokens: ArrayLike | None = None,
    norm_length: int | None = None,
    weights: ArrayLike | None = None,
) -> float:
    losses = policy_token_losses(
        new_logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c
    )
    if weights is not None:
        losses = losses * np.atleast_2d(np.asarray(weights, float))
    *_, counted = as_matrices(new_logps, old_logps, advantages, mask)
    return aggregate(losses, counted, aggregation, denominator, group_tokens=group_tokens, norm_length=norm_length)


def policy_token_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Array:
    new, old, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for i, t in zip(*np.nonzero(counted), strict=True):
        r, a = np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), advantage[i, t]
        # Each sign of the advantage has one bound: the upper one limits reinforcement, the lower one suppression.
        objective = min(r, 1 + clip_high) * a if a >= 0 else max(r, 1 - clip_low) * a
        if clip_ratio_c is not None and a < 0:
            objective = max(objective, clip_ratio_c * a)
        losses[i, t] = -objective
    return losses


def probability_ratio(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    return np.where(counted, np.exp(np.clip(np.where(counted, new - old, 0.0), -BOUND, BOUND)), 1.0)


def sequence_ratio(new_logps: ArrayLike, old_logps: ArrayLike, mask: ArrayLike | None = None) -> Array:
    new, old, _, counted = as_matrices(new_logps, old_logps, 0.0, mask)
    ratio = np.ones_like(new)
    for i, written in enumerate(counted):
        if written.any():
            ratio[i, written] = np.exp(np.clip((new[i, written] - old[i, written]).mean(), -BOUND, BOUND))
    return ratio


def gspo_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Array:
    *_, advantage, counted = as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros(advantage.shape)
    ratio = sequence_ratio(new_logps, old_logps, mask)
    for i, t in zip(*np.nonzero(counted), strict=True):
        s, a = ratio[i, t], advantage[i, t]
        losses[i, t] = -(min(s, 1 + clip_high) * a if a >= 0 else max(s, 1 - clip_low) * a)
    return losses


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


def cispo_losses(
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
    for i, t in zip(*np.nonzero(counted), strict=True):
        weight = min(max(np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), 1 - clip_low), 1 + clip_high)
        losses[i, t] = -weight * advantage[i, t] * new[i, t]
    return losses


def aggregate(
    values: ArrayLike,
    mask: ArrayLike,
    aggregation: str = "token-mean",
    denominator: float | None = None,
    *,
    group_tokens: ArrayLike | None = None,
    norm_length: int | None = None,
) -> float:
    counted = np.atleast_2d(np.asarray(mask, bool))
    values_BT = np.where(counted, np.atleast_2d(np.asarray(values, float)), 0.0)
    sums, tokens = values_BT.sum(1), counted.sum(1)
    samples = [i for i in range(len(tokens)) if tokens[i] > 0]
    if not samples:
        return 0.0
    if aggregation == "token-mean":
        total, count = sums.sum(), float(tokens.sum())
    elif aggregation == "token-mean-per-group":
        of_group = np.full(len(tokens), tokens.sum()) if group_tokens is None else np.asarray(group_tokens, float)
        total = sum(sums[i] / of_group[i] for i in samples)
        count = sum(tokens[i] / of_group[i] for i in samples)
    elif aggregation == "seq-mean-token-mean":
        total, count = sum(sums[i] / tokens[i] for i in samples), len(samples)
    elif aggregation == "seq-mean-token-sum-norm":
        total, count = sum(sums[i] for i in samples) / (norm_length or counted.shape[1]), len(samples)
    elif aggregation == "micro-batch-token-mean":
        total, count = sums.sum() / tokens.sum(), 1.0
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}")
    return float(total / (count if denominator is None else denominator))


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
    high, low, dual = clipped_tokens(
        new_logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c
    )
    *_, counted = as_matrices(new_logps, old_logps, advantages, mask)
    tokens = max(int(counted.sum()), 1)
    return ReferenceClipFractions(high.sum() / tokens, low.sum() / tokens, dual.sum() / tokens)


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


def dynamic_sampling_filter(values: ArrayLike, eps: float = 1e-6) -> Array:
    groups = np.asarray(values)
    if groups.dtype == bool:
        return np.array([0 < int(group.sum()) < len(group) for group in groups], bool)
    return np.array([group.max() - group.min() > eps for group in groups.astype(float)], bool)


def soft_overlong_punishment(lengths: ArrayLike, max_length: int, cache_length: int, factor: float = 1.0) -> Array:
    def punishment(length: float) -> float:
        if length <= max_length - cache_length:
            return 0.0
        if length <= max_length:
            return factor * (max_length - cache_length - length) / cache_length
        return -factor

    return np.asarray(np.vectorize(punishment, otypes=[float])(np.asarray(lengths, float)))


def overlong_reward_shaping(
    rewards: ArrayLike, lengths: ArrayLike, max_length: int, penalty_weight: float = 0.1
) -> Array:
    rewards_, lengths_ = np.asarray(rewards, float), np.asarray(lengths, float)
    return np.where(lengths_ <= max_length, rewards_, rewards_ - penalty_weight * (lengths_ - max_length) / max_length)


def entropy_from_logits(logits: ArrayLike) -> Array:
    shifted = np.asarray(logits, float) - np.max(logits, axis=-1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(probabilities > 0, probabilities * np.log(probabilities), 0.0)
    return np.asarray(-terms.sum(-1))


def value_loss(
    values: ArrayLike,
    old_values: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float | None = None,
    aggregation: str = "token-mean",
    denominator: float | None = None,
) -> float:
    new, old, wanted = (np.asarray(array, float) for array in (values, old_values, targets))
    losses = np.zeros_like(new)
    for place in zip(*np.nonzero(np.asarray(mask, bool)), strict=True):
        v, before, r = new[place], old[place], wanted[place]
        near = v if clip is None else min(max(v, before - clip), before + clip)
        losses[place] = max((v - r) ** 2, (near - r) ** 2) / 2
    return aggregate(losses, mask, aggregation, denominator)


def explained_variance(values: ArrayLike, targets: ArrayLike, mask: ArrayLike) -> float:
    counted = np.asarray(mask, bool)
    predicted, wanted = np.asarray(values, float)[counted], np.asarray(targets, float)[counted]
    return float(1 - np.var(wanted - predicted) / np.var(wanted)) if np.ptp(wanted) > 0 else float("nan")


def positive_lm_loss(
    logps: ArrayLike,
    correct: ArrayLike,
    mask: ArrayLike,
    *,
    weight: float = 0.1,
    denominator: float | None = None,
) -> float:
    chosen = np.asarray(mask, bool) & np.asarray(correct, bool)[:, None]
    surprise = -np.asarray(logps, float)[chosen].sum()
    return float(weight * surprise / (denominator or max(chosen.sum(), 1)))
