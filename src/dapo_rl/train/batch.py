"""Turns judged groups into a batch: rewards, length penalties, advantages. Shapes: P groups × G samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from dapo_rl.config import Config
from dapo_rl.objectives.advantages import Advantages
from dapo_rl.objectives.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.train.own import build_advantages
from dapo_rl.types import FloatArray, Group, Sample, SeenTokens, TrainedGroup, TrainSample


def make_batch(
    groups: Sequence[Group],
    config: Config,
    version: int = 0,
    filled_up: Collection[int] = frozenset(),
    advantages: Advantages | None = None,
    rewards: Mapping[int, Tensor] | None = None,
) -> tuple[TrainedGroup, ...]:
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
    lengths_PG = torch.tensor([[_length(s) for s in group.samples] for group in groups])
    advantages_PG = estimate(rewards_PG, _in_baseline(groups, in_loss_PG, config, filled_up), lengths_PG)
    return tuple(
        TrainedGroup(
            group=group,
            samples=tuple(
                TrainSample(
                    prompt_ids=group.prompt.token_ids,
                    response_ids=sample.token_ids,
                    old_logps=sample.logps,
                    advantages=np.full(len(sample.token_ids), advantages_PG[p, g].item(), np.float32),
                    group=p,
                    in_loss=bool(in_loss_PG[p, g]),
                    correct=group.verdicts[g].correct,
                    fresh=sample.versions == version,
                    mask=sample.mask,
                )
                for g, sample in enumerate(group.samples)
            ),
            rewards=tuple(rewards_PG[p].tolist()),
            length_penalties=tuple(penalties_PG[p].tolist()),
        )
        for p, group in enumerate(groups)
    )


def with_proximal(
    batch: Sequence[TrainedGroup], score: Callable[[Sequence[TrainSample]], list[FloatArray]]
) -> tuple[TrainedGroup, ...]:
    """The batch with the log-probabilities of its trained samples under the policy that `score` computes with."""
    samples = [sample for group in batch for sample in group.samples if sample.trained_tokens]
    scored = zip(samples, score(samples), strict=True)
    return replace_samples(batch, [replace(sample, proximal_logps=logps) for sample, logps in scored])


def replace_samples(batch: Sequence[TrainedGroup], trained: Iterable[TrainSample]) -> tuple[TrainedGroup, ...]:
    """The batch with other trained samples, in their order."""
    others = iter(trained)

    def replaced(group: TrainedGroup) -> TrainedGroup:
        samples = tuple(next(others) if sample.trained_tokens else sample for sample in group.samples)
        return replace(group, samples=samples)

    return tuple(replaced(group) for group in batch)


def as_seen(batch: Sequence[TrainedGroup], seen: Sequence[SeenTokens | None]) -> tuple[TrainedGroup, ...]:
    """The batch with the per-token results of its last pass; `seen` is in the order of the samples."""
    ends = accumulate(len(group.samples) for group in batch)
    return tuple(
        replace(group, seen=tuple(seen[end - len(group.samples) : end])) for group, end in zip(batch, ends, strict=True)
    )


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
    lengths = torch.tensor([_length(s) for s in group.samples])
    shape, limit = config.overlong.shape, config.overlong_max_length
    if shape == "soft":
        return scores + soft_overlong_punishment(lengths, limit, config.overlong_cache_length, config.overlong.factor)
    if shape == "linear":
        return overlong_reward_shaping(scores, lengths, limit, config.overlong.factor)
    return scores


def _length(sample: Sample) -> int:
    """The tokens that the policy wrote; those from an environment do not count."""
    return int(np.count_nonzero(sample.mask))


def split_mini_batches(batch: Sequence[TrainedGroup], count: int) -> list[tuple[TrainSample, ...]]:
    """Splits the batch into `count` mini-batches of whole groups, as evenly as possible; at least one group each."""
    count = min(count, len(batch))
    bounds = [round(i * len(batch) / count) for i in range(count + 1)]
    return [tuple(sample for group in batch[start:end] for sample in group.samples) for start, end in pairwise(bounds)]
