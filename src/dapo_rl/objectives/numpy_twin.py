"""The same functions in plain NumPy: a readable specification, and the oracle for the tests.

Computes in float64, with loops where they are clearer; shares no code with the PyTorch functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dapo_rl.objectives.numpy_twin_tokens import Array, as_matrices, policy_token_losses


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
