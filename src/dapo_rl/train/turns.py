"""Credit of single turns, by `env.turn_discount`.

The reward of an episode is spread over the policy's turns: each has what the environment gave for it, and the last one
everything else, such as the score of a verifier and the length penalty. The return of a turn is the discounted sum of
its reward and of those after it: `G_k = r_k + γ G_{k+1}`. The turns of an episode are those of all its trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo_rl.train.custom import Advantages
from dapo_rl.types import Batch, FloatArray, Group, Trajectory, Turn, Verdict

ENVIRONMENT = "environment"
"""The part of a verdict that is the environment's, where there is a verifier too."""


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """A turn of the policy."""

    trajectory: int
    """The place of its trajectory among those of the group."""
    turn: Turn
    reward: float
    after: float = 0.0
    """The discounted sum of the rewards after it."""

    @property
    def returned(self) -> float:
        return self.reward + self.after

    @property
    def tokens(self) -> slice:
        return slice(self.turn.start, self.turn.end)


def turn_credits(group: Group, discount: float) -> list[list[TurnCredit]]:
    """The turns of each episode of a group that is in a batch."""
    episodes: list[list[TurnCredit]] = []
    for index, (sample, verdict) in enumerate(group.judged):
        forks = [place for place, fork in enumerate(group.forks, len(group.samples)) if fork.index == index]
        turns = [(place, turn) for place in (*forks, index) for turn in _turns(group.trajectories[place], verdict)]
        # Not from the scalar `reward`: in float32, what is left of rewards of other sizes would differ by rounding.
        rest = verdict.score - sum(turn.reward for _, turn in turns[:-1]) + sample.scalars["length_penalty"]
        after, credits_ = 0.0, list[TurnCredit]()
        for number, (place, turn) in enumerate(reversed(turns)):
            credit = TurnCredit(place, turn, turn.reward if number else rest, after)
            credits_.append(credit)
            after = discount * credit.returned
        episodes.append(credits_[::-1])
    return episodes


def _turns(trajectory: Trajectory, verdict: Verdict) -> list[Turn]:
    """The policy's turns with their weighted rewards."""
    whole = (Turn(0, len(trajectory.token_ids), "policy"),) if trajectory.written else ()
    weight = next((part.weight for part in verdict.parts if part.name == ENVIRONMENT), 1.0)
    return [
        Turn(turn.start, turn.end, "policy", reward=weight * turn.reward)
        for turn in trajectory.turns or whole
        if turn.author == "policy"
    ]


def with_turn_advantages(batch: Batch, estimate: Advantages, discount: float) -> Batch:
    """The batch with the column `advantages`, constant within a turn; 0 for tokens of an environment.

    Turn k of an episode is compared with the k-th turns of the others, by the returns and the lengths of these turns.
    """
    episodes = [turn_credits(group, discount) for group in batch.groups]
    columns = [[np.zeros(len(each.token_ids), np.float32) for each in group.trajectories] for group in batch.groups]
    for k in range(max((len(turns) for of_group in episodes for turns in of_group), default=0)):
        at_k = [[turns[k] if k < len(turns) else None for turns in of_group] for of_group in episodes]
        mask_PG = torch.tensor(
            [
                [
                    turn is not None and bool(s.scalars["in_baseline"])
                    for s, turn in zip(group.samples, row, strict=True)
                ]
                for group, row in zip(batch.groups, at_k, strict=True)
            ]
        )
        returns_PG = torch.tensor([[0.0 if turn is None else turn.returned for turn in row] for row in at_k])
        lengths_PG = torch.tensor([[0 if t is None else t.turn.end - t.turn.start for t in row] for row in at_k])
        advantages = estimate(returns_PG, None if mask_PG.all() else mask_PG, lengths_PG, batch)
        for of_group, row, values in zip(columns, at_k, advantages, strict=True):
            for turn, value in zip(row, values, strict=True):
                if turn is not None:
                    of_group[turn.trajectory][turn.tokens] = _of_turn(value, turn, is_fork=turn.trajectory >= len(row))
    rows = iter([column for of_group in columns for column in of_group])
    return batch.with_samples(sample.replace(advantages=next(rows)) for sample in batch.samples)


def _of_turn(value: Tensor, turn: TurnCredit, is_fork: bool) -> FloatArray | float:
    """Estimators may return an advantage for each token of the samples; forks have others."""
    if not value.dim():
        return value.item()
    return value.mean().item() if is_fork else value[turn.tokens].numpy()


def turn_rewards(batch: Batch, discount: float) -> list[tuple[FloatArray, FloatArray]]:
    """For GAE: the reward of each token and the discount after it, of each trajectory of the batch.

    A turn's reward is at its last token. A trajectory that is not the episode's last one ends with what follows it.
    """
    rows: list[tuple[FloatArray, FloatArray]] = []
    for group in batch.groups:
        of_group = [
            (np.zeros(len(each.token_ids), np.float32), np.ones(len(each.token_ids), np.float32))
            for each in group.trajectories
        ]
        for turns in turn_credits(group, discount):
            for turn, following in zip(turns, [*turns[1:], None], strict=False):
                rewards, discounts = of_group[turn.trajectory]
                ends = following is None or following.trajectory != turn.trajectory
                rewards[turn.turn.end - 1] = turn.returned if ends else turn.reward
                discounts[turn.turn.end - 1] = discount
        rows += of_group
    return rows
