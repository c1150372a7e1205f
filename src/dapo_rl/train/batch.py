"""Turns judged groups into a batch: rewards, length penalties, advantages. Shapes: P groups × G samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapo_rl.config import Config
from dapo_rl.objectives.advantages import Advantages
from dapo_rl.objectives.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.train.custom import build_advantages
from dapo_rl.types import Batch, Group, Update


def make_batch(
    groups: Sequence[Group],
    config: Config,
    version: int = 0,
    filled_up: Collection[int] = frozenset(),
    advantages: Advantages | None = None,
    rewards: Mapping[int, Tensor] | None = None,
    step: int = 0,
) -> Batch:
    """The batch to train the weights of `version` on.

    Groups whose draws are in `filled_up` are uninformative: their advantages are 0 and they are excluded from
    normalisation, although the length penalty can make their rewards differ. `advantages` is the function that
    `algo.advantage` names, if already loaded; `rewards` is the result of `shaped_rewards`.
    """
    rewards = shaped_rewards(groups, config) if rewards is None else rewards
    scores_PG = torch.tensor([[v.score for v in group.verdicts] for group in groups])
    rewards_PG = torch.stack([rewards[group.draw] for group in groups])
    penalties_PG = rewards_PG - scores_PG
    truncated_PG = torch.tensor([[s.truncated for s in group.samples] for group in groups])
    in_loss_PG = ~truncated_PG if config.overlong.mask_truncated else torch.ones_like(truncated_PG)
    estimate = advantages or build_advantages(config.algo)
    lengths_PG = torch.tensor([[s.written for s in group.samples] for group in groups])
    advantages_PG = estimate(rewards_PG, _in_baseline(groups, in_loss_PG, config, filled_up), lengths_PG)
    return Batch(
        tuple(
            replace(
                group,
                samples=tuple(
                    sample.replace(
                        prompt_ids=group.prompt.token_ids,
                        advantages=advantages_PG[p, g].item(),
                        fresh=sample.versions == version,
                        loss_mask=sample.mask & bool(in_loss_PG[p, g]),
                        scalars={
                            "group": p,
                            "correct": group.verdicts[g].correct,
                            "reward": rewards_PG[p, g].item(),
                            "length_penalty": penalties_PG[p, g].item(),
                        },
                    )
                    for g, sample in enumerate(group.samples)
                ),
            )
            for p, group in enumerate(groups)
        ),
        step,
    )


def with_diagnostics(batch: Batch, updates: Sequence[Update]) -> Batch:
    """The batch with the token diagnostics of the updates of its last pass."""
    diagnostics = [columns for update in updates for columns in update.columns]
    return batch.with_samples(s.replace(**(c or {})) for s, c in zip(batch.samples, diagnostics, strict=True))


def _in_baseline(
    groups: Sequence[Group], in_loss_PG: Tensor, config: Config, filled_up: Collection[int]
) -> Tensor | None:
    """The samples that count in the baseline; None means all of them."""
    mask_PG = None if config.overlong.masked_in_baseline else in_loss_PG
    if not filled_up:
        return mask_PG
    informative_P1 = torch.tensor([[group.draw not in filled_up] for group in groups])
    return informative_P1.expand_as(in_loss_PG) if mask_PG is None else mask_PG & informative_P1


def shaped_rewards(groups: Iterable[Group], config: Config) -> dict[int, Tensor]:
    """The rewards of each group's samples by draw, including the configured length penalty."""
    return {group.draw: _shaped(group, config) for group in groups}


def _shaped(group: Group, config: Config) -> Tensor:
    scores = torch.tensor([v.score for v in group.verdicts])
    lengths = torch.tensor([s.written for s in group.samples])
    shape, limit = config.overlong.shape, config.overlong_max_length
    if shape == "soft":
        return scores + soft_overlong_punishment(lengths, limit, config.overlong_cache_length, config.overlong.factor)
    if shape == "linear":
        return overlong_reward_shaping(scores, lengths, limit, config.overlong.factor)
    return scores
