"""The rewards that a score is the sum of, as tensors: for an estimator that normalises each on its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_rl.types import Batch, RewardPart, Trajectory, Verdict

LENGTH = "length penalty"


def part_tensors(batch: Batch, penalty_weight: float = 1.0) -> dict[str, Tensor]:
    """`parts[P, G, K]`, the scores of each reward function without their weights, NaN where one did not apply, and
    `part_weights[P, G, K]`. The length penalty is a reward with the weight given."""
    rows = [
        [{part.name: part for part in _parts(sample, verdict, penalty_weight)} for sample, verdict in pairs]
        for pairs in (group.judged for group in batch.groups)
    ]
    names = list(dict.fromkeys(name for of_group in rows for of_sample in of_group for name in of_sample))
    absent = RewardPart("", math.nan, 0.0)
    found = [[[of_sample.get(name, absent) for name in names] for of_sample in of_group] for of_group in rows]
    return {
        "parts": torch.tensor([[[part.score for part in row] for row in of_group] for of_group in found]),
        "part_weights": torch.tensor([[[part.weight for part in row] for row in of_group] for of_group in found]),
    }


def _parts(sample: Trajectory, verdict: Verdict, penalty_weight: float) -> tuple[RewardPart, ...]:
    parts = verdict.parts or (RewardPart("verifier", verdict.score),)
    return (*parts, RewardPart(LENGTH, sample.scalars["length_penalty"], penalty_weight))
