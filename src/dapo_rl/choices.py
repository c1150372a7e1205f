"""The choices of settings, each name defined once with its meaning. Imports no torch.

`dapo_rl.objectives` implements them and has the tables of losses and advantages. Settings, `dapo check`, the ablation
and docs/losses.md read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal[
    "token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm", "micro-batch-token-mean"
]
Normalize = Literal["group", "batch", "none", "leave-one-out"]
KLKind = Literal["k1", "k2", "k3", "k1+", "k3+"]
Proximal = Literal["auto", "behaviour", "recomputed"]
ImportanceMode = Literal["truncate", "mask"]
ImportanceLevel = Literal["token", "sequence"]
Rejection = Literal["token", "geometric", "product", "k3", "veto"]
Masking = Literal["none", "loss", "baseline"]
"""Where truncated samples are left out: nowhere, in the loss, or also in the baseline of their group."""
Unit = Literal["tokens", "groups", "samples", "micro-batches"]


@dataclass(frozen=True, slots=True)
class AggregationChoice:
    weight: str
    """Weight of a token's loss in the sum."""
    denominator: Unit
    """What the sum is divided by: the number of these in the optimizer step."""
    token_level: bool
    """Whether this is the paper's token-level loss (Eq. 12)."""
    effect: str
    """Effect on the run; `{norm_length}` is replaced by the setting."""


AGGREGATIONS: dict[Aggregation, AggregationChoice] = {
    "token-mean": AggregationChoice(
        "1",
        "tokens",
        True,
        "averages over all tokens of the optimizer step, as the authors' script does; Eq. 12, read literally, averages "
        "within each group (token-mean-per-group)",
    ),
    "token-mean-per-group": AggregationChoice(
        "1 / tokens of its group",
        "groups",
        True,
        "Eq. 12, read literally; the authors' script averages over all tokens of the step",
    ),
    "seq-mean-token-mean": AggregationChoice(
        "1 / tokens of its sample",
        "samples",
        False,
        "every response has the same weight, so tokens of long responses count less: good long reasoning is learned "
        "slowly, and long repetition is hardly penalised",
    ),
    "seq-mean-token-sum-norm": AggregationChoice(
        "1 / `algo.norm_length`",
        "samples",
        False,
        "token sums are divided by a constant ({norm_length}), so the size of the update grows with response length",
    ),
    "micro-batch-token-mean": AggregationChoice(
        "1 / tokens of its micro-batch",
        "micro-batches",
        False,
        "each micro-batch is averaged over its own tokens, so the gradient depends on how the batch is split",
    ),
}


@dataclass(frozen=True, slots=True)
class NormalizeChoice:
    words: str
    by_std: bool
    """Whether advantages are divided by a standard deviation."""
    after: str = ""
    """The method that uses it."""


NORMALIZATIONS: dict[Normalize, NormalizeChoice] = {
    "group": NormalizeChoice("group mean and std", True),
    "batch": NormalizeChoice("group mean, std of the batch", True),
    "none": NormalizeChoice("group mean only", False, "Dr. GRPO"),
    "leave-one-out": NormalizeChoice("mean of the others, no std", False, "RLOO"),
}


@dataclass(frozen=True, slots=True)
class KLChoice:
    value: str
    gradient: str
    """In the loss, in expectation over tokens of the policy."""
    learns: bool = True
    """Whether that gradient is other than 0."""
    unbiased: bool = False
    """Whether it is that of KL(policy ‖ reference) if weighted by a ratio (`algo.kl_unbiased`)."""


KL_KINDS: dict[KLKind, KLChoice] = {
    "k1": KLChoice("log-ratio: unbiased, can be negative", "0; only in the reward", learns=False, unbiased=True),
    "k2": KLChoice("half the squared log-ratio: biased, low variance", "that of KL(policy ‖ reference)"),
    "k3": KLChoice("ratio − 1 − log-ratio: unbiased, never negative", "that of KL(reference ‖ policy)", unbiased=True),
    "k1+": KLChoice("that of k1", "that of k2"),
    "k3+": KLChoice("that of k3", "that of k2"),
}

PROXIMALS: dict[Proximal, str] = {
    "auto": "`recomputed` for losses with one ratio per sequence (`gspo`, `gspo-token`), `behaviour` for all others",
    "behaviour": "the policy that sampled the token, with the log-probability that the engine recorded",
    "recomputed": "the policy at the beginning of the step, with the trainer's log-probability",
}

IMPORTANCE_LEVELS: dict[ImportanceLevel, str] = {
    "token": "its own ratio: low variance, biased",
    "sequence": "the product of the ratios of its sample's tokens: unbiased, high variance",
}

IMPORTANCE_MODES: dict[ImportanceMode, str] = {
    "truncate": "gets the bound as its weight",
    "mask": "gets the weight 0, and still counts in the denominator",
}


@dataclass(frozen=True, slots=True)
class RejectionChoice:
    words: str
    """What is rejected."""
    two_sided: bool = False
    """Whether it has two bounds, or one."""


REJECTIONS: dict[Rejection, RejectionChoice] = {
    "token": RejectionChoice("tokens whose own r is outside [low, high]", True),
    "geometric": RejectionChoice("samples whose geometric mean of r is outside [low, high]", True),
    "product": RejectionChoice("samples whose product of r is outside [low, high]", True),
    "k3": RejectionChoice("samples whose mean of r − 1 − log r is above the bound"),
    "veto": RejectionChoice("samples with a token whose r is below the bound"),
}
"""`algo.reject`; r is the ratio proximal / behaviour of a token."""

FIXED_OPTIONS = {
    "model": "set model.name",
    "dtype": "set model.dtype",
    "longest": "set data.max_prompt_tokens and sampling.max_new_tokens",
    "max_model_len": "set data.max_prompt_tokens and sampling.max_new_tokens",
    "max_num_seqs": "set sampling.max_batch",
    "tensor_parallel_size": "set cluster.engine_gpus",
    "logprobs_mode": "training needs the log-probabilities as they are",
    "generation_config": "it would change the policy",
    "trust_remote_code": "the code of models is not run",
}
"""What `engine_options` cannot set, and the remedy."""
VERIFIERS = ("math", "exact", "gym")
"""`reward.verifier` also accepts a user-defined function."""
NO_VERIFIER = "none"
"""`reward.verifier` where the environment gives all rewards."""


REWARD_MODEL = "model:"
"""The prefix of a reward model in `reward.verifier`."""


def is_reward_model(verifier: str) -> bool:
    return verifier.startswith(REWARD_MODEL)


def is_judge(verifier: str) -> bool:
    """Whether a verifier is a file that describes a judge."""
    return verifier.endswith((".yaml", ".yml"))


def is_function(name: str) -> bool:
    """Whether a setting names a user-defined function, `module:name` or `file.py:name`."""
    return ":" in name
