"""The same functions in plain NumPy: a readable specification, and the oracle for the tests.

Computes in float64, with loops where they are clearer; shares no code with the PyTorch functions.
"""

from __future__ import annotations

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
    new, old, advantage, counted = _as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    weight = np.ones_like(new) if weights is None else np.atleast_2d(np.asarray(weights, float))
    for i, t in zip(*np.nonzero(counted), strict=True):
        r, a = np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), advantage[i, t]
        # Each sign of the advantage has one bound: the upper one limits reinforcement, the lower one suppression.
        objective = min(r, 1 + clip_high) * a if a >= 0 else max(r, 1 - clip_low) * a
        if clip_ratio_c is not None and a < 0:
            objective = max(objective, clip_ratio_c * a)
        losses[i, t] = -objective * weight[i, t]
    return aggregate(losses, counted, aggregation, denominator, group_tokens=group_tokens, norm_length=norm_length)


def gspo_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Array:
    new, old, advantage, counted = _as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for i, written in enumerate(counted):
        if written.any():
            s = np.exp(np.clip((new[i, written] - old[i, written]).mean(), -BOUND, BOUND))
            for t in np.nonzero(written)[0]:
                a = advantage[i, t]
                losses[i, t] = -(min(s, 1 + clip_high) * a if a >= 0 else max(s, 1 - clip_low) * a)
    return losses


gspo_token_losses = gspo_losses
"""The two differ in the gradient only."""


def cispo_losses(
    new_logps: ArrayLike,
    old_logps: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Array:
    new, old, advantage, counted = _as_matrices(new_logps, old_logps, advantages, mask)
    losses = np.zeros_like(new)
    for i, t in zip(*np.nonzero(counted), strict=True):
        weight = min(max(np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), 1 - clip_low), 1 + clip_high)
        losses[i, t] = -weight * advantage[i, t] * new[i, t]
    return losses


def importance_weights(
    proximal_logps: ArrayLike,
    behaviour_logps: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    cap: float,
    mode: str = "truncate",
) -> Array:
    if mode not in ("truncate", "mask"):
        raise ValueError(f"unknown importance mode {mode!r}")
    difference: Array = np.asarray(proximal_logps, float) - np.asarray(behaviour_logps, float)
    counted = np.broadcast_to(True if mask is None else np.asarray(mask, bool), difference.shape)
    weights = np.ones_like(difference)
    for place in zip(*np.nonzero(counted), strict=True):
        ratio = np.exp(np.clip(difference[place], -BOUND, BOUND))
        too_large = 0.0 if mode == "mask" else cap
        weights[place] = ratio if ratio <= cap else too_large
    return weights


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
    new, old, advantage, counted = _as_matrices(new_logps, old_logps, advantages, mask)
    high = low = dual = 0
    for i, t in zip(*np.nonzero(counted), strict=True):
        r, a = np.exp(np.clip(new[i, t] - old[i, t], -BOUND, BOUND)), advantage[i, t]
        high += int(a > 0 and r > 1 + clip_high)
        low += int(a < 0 and r < 1 - clip_low)
        dual += int(a < 0 and clip_ratio_c is not None and r > clip_ratio_c)
    tokens = max(int(counted.sum()), 1)
    return ReferenceClipFractions(high / tokens, low / tokens, dual / tokens)


def dynamic_sampling_filter(values: ArrayLike, eps: float = 1e-6) -> Array:
    groups = np.asarray(values)
    if groups.dtype == bool:
        return np.array([0 < int(group.sum()) < len(group) for group in groups], bool)
    return np.array([group.max() - group.min() > eps for group in groups.astype(float)], bool)


def group_advantages(
    rewards: ArrayLike,
    *,
    normalize: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    mask: ArrayLike | None = None,
) -> Array:
    rewards_BG = np.asarray(rewards, float)
    counted = np.ones_like(rewards_BG, bool) if mask is None else np.asarray(mask, bool)
    advantages = np.zeros_like(rewards_BG)
    everything = rewards_BG[counted]
    for b, (group, included) in enumerate(zip(rewards_BG, counted, strict=True)):
        members = group[included]
        if len(members) == 0 or members.max() == members.min():
            continue
        centred = members - members.mean()
        if normalize == "group":
            centred = centred / (members.std(ddof=ddof) + eps)
        elif normalize == "batch":
            centred = centred / (everything.std(ddof=ddof) + eps)
        elif normalize == "leave-one-out":
            others = (members.sum() - members) / (len(members) - 1)
            centred = members - others
        elif normalize != "none":
            raise ValueError(f"unknown normalize {normalize!r}")
        advantages[b, included] = centred
    return advantages


def opo_advantages(rewards: ArrayLike, mask: ArrayLike | None = None, *, lengths: ArrayLike) -> Array:
    rewards_PG, lengths_PG = np.asarray(rewards, float), np.asarray(lengths, float)
    counted = np.ones_like(rewards_PG, bool) if mask is None else np.asarray(mask, bool)
    advantages = np.zeros_like(rewards_PG)
    for p, included in enumerate(counted):
        if included.any():
            baseline = np.average(rewards_PG[p, included], weights=lengths_PG[p, included])
            advantages[p, included] = rewards_PG[p, included] - baseline
    return advantages


def reinforce_plus_plus(
    rewards: ArrayLike, mask: ArrayLike | None = None, *, lengths: ArrayLike, ddof: int = 1, eps: float = 1e-6
) -> Array:
    rewards_PG, lengths_PG = np.asarray(rewards, float), np.asarray(lengths, int)
    counted = np.ones_like(rewards_PG, bool) if mask is None else np.asarray(mask, bool)
    tokens = np.repeat(rewards_PG[counted], lengths_PG[counted])  # the return of every token
    if len(tokens) <= ddof or tokens.max() == tokens.min():
        return np.zeros_like(rewards_PG)
    return np.where(counted, (rewards_PG - tokens.mean()) / (tokens.std(ddof=ddof) + eps), 0.0)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike, mask: ArrayLike | None = None, *, lengths: ArrayLike, ddof: int = 1, eps: float = 1e-6
) -> Array:
    differences = group_advantages(rewards, normalize="none", mask=mask)
    return reinforce_plus_plus(differences, mask, lengths=lengths, ddof=ddof, eps=eps)


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


def entropy_from_logits(logits: ArrayLike) -> Array:
    shifted = np.asarray(logits, float) - np.max(logits, axis=-1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(probabilities > 0, probabilities * np.log(probabilities), 0.0)
    return np.asarray(-terms.sum(-1))


def gae(
    values: ArrayLike, rewards: ArrayLike, mask: ArrayLike, lambda_: float | ArrayLike, gamma: float = 1.0
) -> Array:
    values_BT, counted, given = np.asarray(values, float), np.asarray(mask, bool), np.asarray(rewards, float)
    advantages = np.zeros_like(values_BT)
    lambdas = np.broadcast_to(np.asarray(lambda_, float), len(values_BT))
    for i, written in enumerate(counted):
        after = following = 0.0  # the advantage and the value of the token after
        for place, t in enumerate(reversed(np.nonzero(written)[0])):
            reward = given[i, t] if given.ndim == 2 else given[i] if place == 0 else 0.0
            after = reward + gamma * following - values_BT[i, t] + gamma * lambdas[i] * after
            advantages[i, t], following = after, values_BT[i, t]
    return advantages


def decoupled_gae(
    values: ArrayLike,
    rewards: ArrayLike,
    mask: ArrayLike,
    *,
    policy_lambda: float | ArrayLike,
    critic_lambda: float | ArrayLike = 1.0,
    gamma: float = 1.0,
) -> tuple[Array, Array]:
    targets = gae(values, rewards, mask, critic_lambda, gamma) + np.asarray(values, float)
    return gae(values, rewards, mask, policy_lambda, gamma), np.where(np.asarray(mask, bool), targets, 0.0)


def token_rewards(rewards: ArrayLike, mask: ArrayLike, kl: ArrayLike | None = None, kl_coef: float = 0.0) -> Array:
    counted, given = np.asarray(mask, bool), np.asarray(rewards, float)
    result = np.zeros(counted.shape) if kl is None else np.where(counted, -kl_coef * np.asarray(kl, float), 0.0)
    for i, written in enumerate(counted):
        if written.any():
            result[i, np.nonzero(written)[0][-1]] += given[i]
    return result


def adaptive_lambda(lengths: ArrayLike, alpha: float = 0.05, lowest: float = 0.0) -> Array:
    return np.array([max(lowest, 1 - 1 / (alpha * length)) for length in np.asarray(lengths, float)])


def whitened(advantages: ArrayLike, mask: ArrayLike, eps: float = 1e-8) -> Array:
    counted, values = np.asarray(mask, bool), np.asarray(advantages, float)
    members = values[counted]
    variance = members.var(ddof=1) if len(members) > 1 else 0.0
    return np.where(counted, (values - members.mean()) / np.sqrt(variance + eps), 0.0)


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


def _as_matrices(
    new_logps: ArrayLike, old_logps: ArrayLike, advantages: ArrayLike, mask: ArrayLike | None
) -> tuple[Array, Array, Array, Array]:
    new, old = np.atleast_2d(np.asarray(new_logps, float)), np.atleast_2d(np.asarray(old_logps, float))
    advantage = np.asarray(advantages, float)
    if advantage.ndim == 1 and np.ndim(new_logps) == 2:
        advantage = advantage[:, None]
    counted = np.ones_like(new, bool) if mask is None else np.broadcast_to(np.asarray(mask, bool), new.shape)
    return new, old, np.broadcast_to(advantage, new.shape), counted
