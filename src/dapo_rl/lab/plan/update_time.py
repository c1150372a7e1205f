"""The time of the updates of a step: samples are spread over the ranks by their tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from dapo_rl.lab.plan.rates import Rates

FORWARD_SHARE = 1 / 3
"""The share of the forward pass in an update: the backward pass computes twice as much."""


@dataclass(frozen=True, slots=True)
class Trainer:
    rates: Rates
    gpus: int
    token_budget: int
    """Tokens of a micro-batch."""
    recompute: bool
    mini_batches: int
    epochs: int = 1
    critic: bool = False
    """Whether a critic of the same size is trained too, and scores each sample once."""


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Seconds of the updates of a step."""

    even: float
    """If every rank had the same number of tokens."""
    uneven: float
    """Added because ranks wait for the one with the longest sample of a mini-batch."""
    traffic: float
    """Added because gathering weights and reducing gradients takes longer than computing."""
    optimizer: float
    transfer: float
    """The transfer of new weights to the engines."""

    @property
    def updating(self) -> float:
        return self.even + self.uneven + self.traffic + self.optimizer

    @property
    def total(self) -> float:
        return self.updating + self.transfer


def update_time(trainer: Trainer, lengths: Sequence[int], prompt_tokens: int, transfer: float) -> UpdateTime:
    """The time of a step's updates; `lengths` are its samples in the order of training."""
    rates, ranks = trainer.rates, trainer.gpus
    size = max(1, ceil(len(lengths) / trainer.mini_batches))
    even = uneven = traffic = 0.0
    updates = 0
    for start in range(0, len(lengths), size):
        batch = lengths[start : start + size]
        tokens, most = sum(batch), largest_load(batch, ranks)
        position = prompt_tokens + sum(length * length for length in batch) / (2 * tokens)
        shared = rates.update(tokens / ranks, position, trainer.recompute)
        longest = rates.update(most, position, trainer.recompute)
        sent = rates.gradients(ceil(most / trainer.token_budget), ranks)
        even += shared
        uneven += longest - shared
        traffic += max(0.0, sent - longest)
        updates += 1
    often = trainer.epochs * (2 if trainer.critic else 1)
    scores = FORWARD_SHARE if trainer.critic else 0.0
    return UpdateTime(
        even * (often + scores),
        uneven * (often + scores),
        traffic * often,
        updates * often * rates.optimizer(ranks),
        transfer,
    )


def largest_load(lengths: Sequence[int], ranks: int) -> int:
    """The tokens of the rank with the most, if each sample, the longest first, goes to the rank with the fewest."""
    loads = [0] * min(ranks, len(lengths))
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)
