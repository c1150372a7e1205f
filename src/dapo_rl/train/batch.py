"""Turns judged groups into a batch: rewards, length penalties, masks. Shapes: P groups × G samples, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapo_rl.config import Config
from dapo_rl.objectives.overlong import overlong_reward_shaping, soft_overlong_punishment
from dapo_rl.rollout.in_flight import LIMIT
from dapo_rl.train.custom import Advantages
from dapo_rl.train.off_policy import without_stale_tokens
from dapo_rl.train.turns import with_turn_advantages
from dapo_rl.types import Batch, Group, Trajectory, Update


def make_batch(
    groups: Sequence[Group],
    config: Config,
    version: int = 0,
    filled_up: Collection[int] = frozenset(),
    rewards: Mapping[int, Tensor] | None = None,
    step: int = 0,
) -> Batch:
    """The batch to train the weights of `version` on, still without advantages.

    Groups whose draws are in `filled_up` are uninformative: their advantages are 0 and they are excluded from
    normalisation, although the length penalty can make their rewards differ. `rewards` is the result of
    `shaped_rewards`.
    """
    rewards = shaped_rewards(groups, config) if rewards is None else rewards
    rewards_PG = torch.stack([rewards[group.draw] for group in groups])
    # Not the difference of rewards and scores: its rounding errors would be a reward that differs within the group.
    penalties_PG = torch.stack([length_penalties(group, config) for group in groups])
    truncated_PG = torch.tensor([[s.truncated for s in group.samples] for group in groups])
    in_loss_PG = ~truncated_PG if config.overlong.mask_truncated else torch.ones_like(truncated_PG)
    informative_P1 = torch.tensor([[group.draw not in filled_up] for group in groups])
    in_baseline_PG = informative_P1 & (in_loss_PG | config.overlong.masked_in_baseline)

    def prepared(p: int, g: int, sample: Trajectory) -> Trajectory:
        group = groups[p]
        return sample.replace(
            prompt_ids=sample.prompt_ids if len(sample.prompt_ids) else group.prompt.token_ids,
            fresh=sample.versions == version,
            loss_mask=sample.mask & bool(in_loss_PG[p, g]),
            scalars={
                "group": p,
                "correct": group.verdicts[g].correct,
                "in_baseline": in_baseline_PG[p, g].item(),
                "reward": rewards_PG[p, g].item(),
                "length_penalty": penalties_PG[p, g].item(),
            },
        )

    batch = Batch(
        tuple(
            replace(
                group,
                samples=tuple(prepared(p, g, sample) for g, sample in enumerate(group.samples)),
                forks=tuple(prepared(p, fork.index, fork) for fork in group.forks),
            )
            for p, group in enumerate(groups)
        ),
        step,
    )
    oldest = config.algo.max_token_staleness
    return batch if oldest is None else without_stale_tokens(batch, version, oldest)


def with_advantages(batch: Batch, estimate: Advantages, turn_discount: float | None = None) -> Batch:
    """The batch with the column `advantages`: of whole episodes, or, with a discount, of turns."""
    if turn_discount is not None:
        return with_turn_advantages(batch, estimate, turn_discount)

    def table(of: Callable[[Trajectory], float]) -> Tensor:
        return torch.tensor([[of(sample) for sample in group.samples] for group in batch.groups])

    mask_PG = table(lambda sample: bool(sample.scalars["in_baseline"]))
    rewards_PG = table(lambda sample: sample.scalars["reward"])
    lengths_PG = torch.tensor([group.lengths for group in batch.groups])
    advantages = estimate(rewards_PG, None if mask_PG.all() else mask_PG, lengths_PG, batch)

    def advised(sample: Trajectory, row: Tensor, is_fork: bool = False) -> Trajectory:
        if not row.dim():
            return sample.replace(advantages=row.item())
        if is_fork:  # its tokens are others than those of its episode's sample, which have an advantage each
            return sample.replace(advantages=row.mean().item())
        return sample.replace(advantages=row[: len(sample.token_ids)].numpy())

    return batch.with_samples(
        sample
        for group, rows in zip(batch.groups, advantages, strict=True)
        for sample in (
            *(advised(sample, row) for sample, row in zip(group.samples, rows, strict=True)),
            *(advised(fork, rows[fork.index], is_fork=True) for fork in group.forks),
        )
    )


def with_diagnostics(batch: Batch, updates: Sequence[Update]) -> Batch:
    diagnostics = [columns for update in updates for columns in update.columns]
    return batch.with_samples(s.replace(**(c or {})) for s, c in zip(batch.samples, diagnostics, strict=True))


def shaped_rewards(groups: Iterable[Group], config: Config) -> dict[int, Tensor]:
    """The rewards of each group's samples by draw, including the configured length penalty."""
    return {
        group.draw: torch.tensor([v.score for v in group.verdicts]) + length_penalties(group, config)
        for group in groups
    }


def length_penalties(group: Group, config: Config) -> Tensor:
    """What is added to the scores of a group's samples for their lengths."""
    lengths = torch.tensor(group.lengths)
    none = torch.zeros(len(group.lengths))
    longest = group.samples[0].scalars.get(LIMIT, config.sampling.max_new_tokens)
    shape, (limit, cache_length) = config.overlong.shape, config.overlong_limits(int(longest))
    if shape == "soft":
        return soft_overlong_punishment(lengths, limit, cache_length, config.overlong.factor)
    if shape == "linear":
        return overlong_reward_shaping(none, lengths, limit, config.overlong.factor)
    return none
