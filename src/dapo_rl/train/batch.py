"""From judged groups to a batch: reward, length penalty, advantage. Shapes: P groups × G samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dapo_rl.algo import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.algo.registry import Advantages
from dapo_rl.config import Config
from dapo_rl.train.own import build_advantages
from dapo_rl.types import Batch, Group, ScoredSample, TrainSample


def make_batch(
    groups: Sequence[Group],
    config: Config,
    version: int = 0,
    filled_up: Collection[int] = frozenset(),
    advantages: Advantages | None = None,
) -> Batch:
    """The batch that the weights of `version` are trained on.

    Groups whose draws are in `filled_up` have no signal: their advantages are 0, and they count in no normalisation.
    Their shaped rewards may differ, by length alone. `advantages` is what `algo.advantage` names, where that is loaded
    already.
    """
    scores_PG = torch.tensor([[v.score for v in group.verdicts] for group in groups])
    lengths_PG = torch.tensor([[len(s.token_ids) for s in group.samples] for group in groups])
    truncated_PG = torch.tensor([[s.truncated for s in group.samples] for group in groups])

    rewards_PG = shape_rewards(scores_PG, lengths_PG, config)
    in_loss_PG = ~truncated_PG if config.overlong.mask_truncated else torch.ones_like(truncated_PG)
    estimate = advantages or build_advantages(config.algo)
    advantages_PG = estimate(rewards_PG, _in_baseline(groups, in_loss_PG, config, filled_up))
    return Batch(
        groups=tuple(groups),
        samples=tuple(
            tuple(
                TrainSample(
                    prompt_ids=group.prompt.token_ids,
                    response_ids=sample.token_ids,
                    old_logps=sample.logps,
                    advantage=advantages_PG[p, g].item(),
                    group=p,
                    in_loss=bool(in_loss_PG[p, g]),
                    fresh=sample.versions == (version, version),
                )
                for g, sample in enumerate(group.samples)
            )
            for p, group in enumerate(groups)
        ),
        scores=tuple(
            tuple(
                ScoredSample(
                    reward=rewards_PG[p, g].item(),
                    length_penalty=(rewards_PG[p, g] - scores_PG[p, g]).item(),
                    advantage=advantages_PG[p, g].item(),
                )
                for g in range(len(group.samples))
            )
            for p, group in enumerate(groups)
        ),
    )


def _in_baseline(
    groups: Sequence[Group], in_loss_PG: Tensor, config: Config, filled_up: Collection[int]
) -> Tensor | None:
    """Which samples the others are compared with; none stands for all of them."""
    mask_PG = None if config.overlong.masked_in_baseline else in_loss_PG
    if not filled_up:
        return mask_PG
    informative_P1 = torch.tensor([[group.draw not in filled_up] for group in groups])
    return informative_P1.expand_as(in_loss_PG) if mask_PG is None else mask_PG & informative_P1


def shape_rewards(scores: Tensor, lengths: Tensor, config: Config) -> Tensor:
    """Rewards with the length penalty that the recipe asks for."""
    shape, limit = config.overlong.shape, config.overlong_max_length
    if shape == "soft":
        return scores + soft_overlong_punishment(lengths, limit, config.overlong_cache_length, config.overlong.factor)
    if shape == "linear":
        return overlong_reward_shaping(scores, lengths, limit, config.overlong.factor)
    return scores


def split_mini_batches(batch: Batch, count: int) -> list[tuple[TrainSample, ...]]:
    """Whole groups, spread as evenly as they go; a batch with fewer groups than `count` has fewer mini-batches."""
    groups = batch.samples
    count = min(count, len(groups))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    return [tuple(sample for group in groups[start:end] for sample in group) for start, end in pairwise(bounds)]
