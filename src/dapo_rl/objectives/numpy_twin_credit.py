"""The advantages of `numpy_twin`: of samples by their group or batch, of tokens by a critic's values."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dapo_rl.objectives.numpy_twin_tokens import Array


def _counted(rewards: Array, mask: ArrayLike | None) -> Array:
    return np.ones_like(rewards, bool) if mask is None else np.asarray(mask, bool)


def group_advantages(
    rewards: ArrayLike,
    *,
    normalize: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    mask: ArrayLike | None = None,
) -> Array:
    rewards_PG = np.asarray(rewards, float)
    counted = _counted(rewards_PG, mask)
    advantages = np.zeros_like(rewards_PG)
    for p, (group, included) in enumerate(zip(rewards_PG, counted, strict=True)):
        members = group[included]
        if len(members) == 0 or members.max() == members.min():
            continue
        centred = members - members.mean()
        if normalize == "group":
            centred = centred / (members.std(ddof=ddof) + eps)
        elif normalize == "batch":
            centred = centred / (rewards_PG[counted].std(ddof=ddof) + eps)
        elif normalize == "leave-one-out":
            centred = members - (members.sum() - members) / (len(members) - 1)
        elif normalize != "none":
            raise ValueError(f"unknown normalize {normalize!r}")
        advantages[p, included] = centred
    return advantages


def opo_advantages(rewards: ArrayLike, mask: ArrayLike | None = None, *, lengths: ArrayLike) -> Array:
    rewards_PG, lengths_PG = np.asarray(rewards, float), np.asarray(lengths, float)
    counted = _counted(rewards_PG, mask)
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
    counted = _counted(rewards_PG, mask)
    tokens = np.repeat(rewards_PG[counted], lengths_PG[counted])  # the return of every token
    if len(tokens) <= ddof or tokens.max() == tokens.min():
        return np.zeros_like(rewards_PG)
    return np.where(counted, (rewards_PG - tokens.mean()) / (tokens.std(ddof=ddof) + eps), 0.0)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike, mask: ArrayLike | None = None, *, lengths: ArrayLike, ddof: int = 1, eps: float = 1e-6
) -> Array:
    differences = group_advantages(rewards, normalize="none", mask=mask)
    return reinforce_plus_plus(differences, mask, lengths=lengths, ddof=ddof, eps=eps)


def gdpo_advantages(
    rewards: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    parts: ArrayLike | None = None,
    part_weights: ArrayLike | None = None,
    normalize: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Array:
    rewards_PG = np.asarray(rewards, float)
    counted = _counted(rewards_PG, mask)
    parts_PGK = rewards_PG[..., None] if parts is None else np.asarray(parts, float)
    weights_PGK = np.ones_like(parts_PGK) if part_weights is None else np.asarray(part_weights, float)
    sums = np.zeros_like(rewards_PG)
    for k in range(parts_PGK.shape[-1]):
        given = counted & np.isfinite(parts_PGK[..., k])
        alone = group_advantages(
            np.where(given, parts_PGK[..., k], 0.0), normalize=normalize, ddof=ddof, eps=eps, mask=given
        )
        sums[given] += weights_PGK[..., k][given] * alone[given]
    return reinforce_plus_plus(sums, counted, lengths=np.ones_like(sums), ddof=ddof, eps=eps)


def rewards_alone(rewards: ArrayLike, mask: ArrayLike | None = None) -> Array:
    rewards_PG = np.asarray(rewards, float)
    return rewards_PG if mask is None else np.where(np.asarray(mask, bool), rewards_PG, 0.0)


def no_advantages(rewards: ArrayLike, mask: ArrayLike | None = None) -> Array:
    return np.zeros(np.shape(rewards))


def distilled(
    advantages: ArrayLike, teacher_logps: ArrayLike, logps: ArrayLike, mask: ArrayLike, *, weight: float
) -> Array:
    kl = np.asarray(logps, float) - np.asarray(teacher_logps, float)
    return np.where(np.asarray(mask, bool), np.asarray(advantages, float) - weight * kl, 0.0)


def gae(
    values: ArrayLike, rewards: ArrayLike, mask: ArrayLike, lambda_: float | ArrayLike, gamma: float | ArrayLike = 1.0
) -> Array:
    values_BT, counted, given = np.asarray(values, float), np.asarray(mask, bool), np.asarray(rewards, float)
    advantages = np.zeros_like(values_BT)
    lambdas = np.broadcast_to(np.asarray(lambda_, float), len(values_BT))
    gammas = np.broadcast_to(np.asarray(gamma, float), values_BT.shape)
    for i, written in enumerate(counted):
        after = following = 0.0  # the advantage and the value of the token after
        for place, t in enumerate(reversed(np.nonzero(written)[0])):
            reward = given[i, t] if given.ndim == 2 else given[i] if place == 0 else 0.0
            after = reward + gammas[i, t] * (following + lambdas[i] * after) - values_BT[i, t]
            advantages[i, t], following = after, values_BT[i, t]
    return advantages


def decoupled_gae(
    values: ArrayLike,
    rewards: ArrayLike,
    mask: ArrayLike,
    *,
    policy_lambda: float | ArrayLike,
    critic_lambda: float | ArrayLike = 1.0,
    gamma: float | ArrayLike = 1.0,
) -> tuple[Array, Array]:
    targets = gae(values, rewards, mask, critic_lambda, gamma) + np.asarray(values, float)
    return gae(values, rewards, mask, policy_lambda, gamma), np.where(np.asarray(mask, bool), targets, 0.0)


def token_rewards(rewards: ArrayLike, mask: ArrayLike, kl: ArrayLike | None = None, kl_coef: float = 0.0) -> Array:
    counted, given = np.asarray(mask, bool), np.asarray(rewards, float)
    result = np.zeros(counted.shape) if kl is None else np.where(counted, -kl_coef * np.asarray(kl, float), 0.0)
    if given.ndim == 2:
        return result + np.where(counted, given, 0.0)
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
