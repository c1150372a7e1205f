"""What settings choose among: each name once, and what it stands for. It imports no torch.

`dapo_rl.algo` has the functions; settings, `dapo check`, the ablation and docs/losses.md read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal[
    "token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm", "micro-batch-token-mean"
]
Normalize = Literal["group", "batch", "none", "leave-one-out"]
KLKind = Literal["k1", "k2", "k3"]
Unit = Literal["tokens", "groups", "samples", "micro-batches"]


@dataclass(frozen=True, slots=True)
class AggregationChoice:
    weight: str
    """What a token's loss is multiplied by, before the sum is divided."""
    denominator: Unit
    """What the sum is divided by: the number of these in the optimizer step."""
    token_level: bool
    """Whether it is the paper's token-level loss (Eq. 12)."""
    effect: str
    """What it does to the run; `{norm_length}` stands for the setting."""


AGGREGATIONS: dict[Aggregation, AggregationChoice] = {
    "token-mean": AggregationChoice(
        "1",
        "tokens",
        True,
        "over all tokens of the optimizer step, as the authors' script; Eq. 12 to the letter takes each group by its "
        "own count (token-mean-per-group)",
    ),
    "token-mean-per-group": AggregationChoice(
        "1 / tokens of its group",
        "groups",
        True,
        "Eq. 12 to the letter; the authors' script takes all tokens of the step at once",
    ),
    "seq-mean-token-mean": AggregationChoice(
        "1 / tokens of its sample",
        "samples",
        False,
        "each response weighs the same, so the tokens of long ones count less: long good reasoning is learned slowly, "
        "and long repetition is hardly punished",
    ),
    "seq-mean-token-sum-norm": AggregationChoice(
        "1 / `algo.norm_length`",
        "samples",
        False,
        "token sums are divided by a constant ({norm_length}): the update's size grows with the length of responses",
    ),
    "micro-batch-token-mean": AggregationChoice(
        "1 / tokens of its micro-batch",
        "micro-batches",
        False,
        "each micro-batch counts its own tokens, so the gradient depends on how the batch is split",
    ),
}


@dataclass(frozen=True, slots=True)
class NormalizeChoice:
    words: str
    by_std: bool
    """Whether advantages are divided by a standard deviation."""
    after: str = ""
    """The method that has it so."""


NORMALIZATIONS: dict[Normalize, NormalizeChoice] = {
    "group": NormalizeChoice("group mean and std", True),
    "batch": NormalizeChoice("group mean, std of the batch", True),
    "none": NormalizeChoice("group mean only", False, "Dr. GRPO"),
    "leave-one-out": NormalizeChoice("mean of the others, no std", False, "RLOO"),
}

KL_KINDS: dict[KLKind, str] = {
    "k1": "log-ratio: unbiased, can be negative",
    "k2": "half the squared log-ratio: biased, low variance",
    "k3": "ratio − 1 − log-ratio: unbiased, never negative",
}

LOSSES: dict[str, str] = {"dapo": "the clipped policy loss of Eq. 8"}
"""Beside these, `algo.loss` takes a function of the user's own."""
ADVANTAGES: dict[str, str] = {"group": "each sample beside its group, by `algo.normalize`"}
"""Beside these, `algo.advantage` takes a function of the user's own."""


ENGINES = ("native", "hf", "vllm")


def is_function(name: str) -> bool:
    """Whether a setting names code of the user's own, `module:name` or `file.py:name`."""
    return ":" in name
