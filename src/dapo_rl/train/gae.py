"""Credit of single tokens: the advantages and the critic's targets, from values of the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dapo_rl.config import Config, CriticSettings
from dapo_rl.objectives.critic import explained_variance
from dapo_rl.objectives.generalized_advantage import adaptive_lambda, decoupled_gae, token_rewards, whitened
from dapo_rl.objectives.kl import kl_penalty, sample_means
from dapo_rl.train.coefficients import KL_OF_REWARD
from dapo_rl.train.learner import padded
from dapo_rl.train.turns import turn_rewards
from dapo_rl.types import Batch, FloatArray, Trajectory

Score = Callable[[Sequence[Trajectory]], list[FloatArray]]


def with_values(batch: Batch, config: Config, values: Score, kl_coef: float | None = None) -> Batch:
    """The batch with values, advantages and returns of its trained samples, and the step's metrics of the critic.

    `values` scores samples by the critic. If KL is part of the reward, it is that to the column `ref_logps`, with the
    weight `kl_coef`, by default that of the settings. Truncated responses count as finished, with the reward that they
    have.
    """
    kl_coef = config.algo.kl_coef if kl_coef is None else kl_coef
    samples = batch.trained
    if not samples:
        return batch
    discount, by_turn = config.env.turn_discount, list[tuple[FloatArray, FloatArray]]()
    if discount is not None:
        pairs = zip(batch.samples, turn_rewards(batch, discount), strict=True)
        by_turn = [rows for sample, rows in pairs if sample.trained_tokens]
    of_values = values(samples)
    done: list[Trajectory] = []
    lambdas: list[float] = []
    kl_means: list[float] = []
    for _, members in groupby(range(len(samples)), lambda i: samples[i].group):
        # A group at a time: padded, all samples of a step could take gigabytes.
        places = list(members)
        part = slice(places[0], places[-1] + 1)
        mask_BT = torch.from_numpy(padded([sample.mask for sample in samples[part]]))
        lambda_B = _lambda(samples[part], config.critic)
        kl_BT = _kl(samples[part], config) if config.kl_in_reward else None
        rewards_BT, gamma = _rewards(samples[part], by_turn[part], mask_BT, kl_BT, kl_coef)
        estimates = decoupled_gae(
            torch.from_numpy(padded(of_values[part])),
            rewards_BT,
            mask_BT,
            policy_lambda=lambda_B,
            critic_lambda=config.critic.lambda_critic,
            gamma=gamma,
        )
        done += _with_columns(samples[part], of_values[part], *estimates)
        lambdas += lambda_B.tolist()
        kl_means += [] if kl_BT is None else sample_means(kl_BT, mask_BT).tolist()
    if config.critic.whiten:
        done = _whitened(done)
    metrics = {**batch.metrics, **_metrics(done, lambdas)}
    if kl_means and config.algo.kl_target is not None:
        metrics |= {KL_OF_REWARD: sum(kl_means) / len(kl_means), f"{KL_OF_REWARD}_coeff": kl_coef}
    return replace(batch.with_trained(done), metrics=metrics)


def _kl(samples: Sequence[Trajectory], config: Config) -> Tensor:
    old_BT, reference_BT = (torch.from_numpy(padded([s[name] for s in samples])) for name in ("logps", "ref_logps"))
    return kl_penalty(old_BT, reference_BT, config.algo.kl_kind)


def _lambda(samples: Sequence[Trajectory], settings: CriticSettings) -> Tensor:
    lengths = torch.tensor([sample.written for sample in samples])
    if settings.lambda_policy == "adaptive":
        return adaptive_lambda(lengths, settings.length_alpha, settings.lambda_lowest)
    return torch.full((len(samples),), settings.lambda_policy)


def _rewards(
    samples: Sequence[Trajectory],
    by_turn: Sequence[tuple[FloatArray, FloatArray]],
    mask_BT: Tensor,
    kl_BT: Tensor | None,
    kl_coef: float,
) -> tuple[Tensor, float | Tensor]:
    """The reward at each token, and the discount. `by_turn` are the rewards and discounts of tokens, if turns have
    rewards."""
    gamma: float | Tensor = 1.0
    rewards = torch.tensor([sample.scalars["reward"] for sample in samples])
    if by_turn:
        rewards, gamma = (torch.from_numpy(padded(rows)) for rows in zip(*by_turn, strict=True))
    return token_rewards(rewards, mask_BT, kl_BT, 0.0 if kl_BT is None else kl_coef), gamma


def _with_columns(
    samples: Sequence[Trajectory], values: Sequence[FloatArray], advantages_BT: Tensor, returns_BT: Tensor
) -> Iterator[Trajectory]:
    for i, (sample, of_sample) in enumerate(zip(samples, values, strict=True)):
        advantages, returns = (rows[i, : len(of_sample)].numpy() for rows in (advantages_BT, returns_BT))
        yield sample.replace(values=of_sample, advantages=advantages, returns=returns)


def _whitened(samples: Sequence[Trajectory]) -> list[Trajectory]:
    advantages = torch.from_numpy(np.concatenate([sample["advantages"] for sample in samples]))
    mask = torch.from_numpy(np.concatenate([sample.mask for sample in samples]))
    rows = whitened(advantages, mask).split([len(sample.token_ids) for sample in samples])
    return [sample.replace(advantages=row.numpy()) for sample, row in zip(samples, rows, strict=True)]


def _metrics(samples: Sequence[Trajectory], lambdas: Sequence[float]) -> dict[str, float]:
    mask = np.concatenate([sample.mask for sample in samples])
    values, returns, advantages = (
        torch.from_numpy(np.concatenate([sample[name] for sample in samples])[mask])
        for name in ("values", "returns", "advantages")
    )
    return {
        "critic/vf_explained_var": float(explained_variance(values, returns, torch.ones_like(values).bool())),
        "critic/values/mean": float(values.mean()),
        "critic/returns/mean": float(returns.mean()),
        "critic/advantages/mean": float(advantages.mean()),
        "critic/advantages/max": float(advantages.max()),
        "critic/advantages/min": float(advantages.min()),
        "critic/lambda": sum(lambdas) / len(lambdas),
    }
