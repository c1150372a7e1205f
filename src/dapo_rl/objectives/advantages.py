"""Advantages: how much better a sample is than others. Shapes: P groups × G samples.

An estimator is `f(rewards, mask, *, lengths, normalize, ddof, eps)`; it returns the advantage of each sample. Samples
outside `mask` are not part of any mean and get 0. `lengths` are the tokens that the policy wrote. It may leave out
settings that it does not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageEntry:
    function: Callable[..., Tensor]
    formula: str
    source: str
    effect: str = ""
    """How it differs from DAPO's, for `dapo check`."""
    by_std: bool = False
    """Whether advantages are divided by a standard deviation."""
    alone: bool = False
    """Whether a sample can be compared without others of its prompt."""
    verl: tuple[str, ...] = ()
    """verl's names for it, in `algorithm.adv_estimator`."""


ADVANTAGES: dict[str, AdvantageEntry] = {}
"""`algo.advantage` also accepts a user-defined function."""


def group_advantages(
    rewards: Tensor,
    *,
    normalize: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    """`(R − mean) / (std + eps)` over each group of `rewards[P, G]` (Eq. 9).

    `batch` divides by the standard deviation of all rewards instead, `none` does not divide (Dr. GRPO), and
    `leave-one-out` subtracts the mean of the other samples. Samples outside `mask` are not part of any mean and get 0.
    """
    rewards_PG, counted_PG = _given(rewards, mask)
    values_PG = rewards_PG.where(counted_PG, 0.0)
    count_P1 = counted_PG.sum(-1, keepdim=True)
    if mask is None and normalize in ("group", "leave-one-out") and rewards_PG.shape[-1] <= max(ddof, 1):
        raise ValueError(f"a group of {rewards_PG.shape[-1]} has no {normalize} normalisation with ddof {ddof}")
    deviation_PG = _from_the_group(rewards_PG, counted_PG)
    if normalize == "none":
        return deviation_PG
    if normalize == "leave-one-out":
        return deviation_PG * count_P1 / (count_P1 - 1).clamp(min=1)
    if normalize == "group":
        variance = deviation_PG.square().sum(-1, keepdim=True) / (count_P1 - ddof).clamp(min=1)
    elif normalize == "batch":
        count = counted_PG.sum()
        spread_PG = (rewards_PG - values_PG.sum() / count.clamp(min=1)).where(counted_PG, 0.0)
        variance = spread_PG.square().sum() / (count - ddof).clamp(min=1)
    else:
        raise ValueError(f"unknown normalize {normalize!r}")
    # With eps = 0, a constant group would give 0 / 0.
    return (deviation_PG / (variance.sqrt() + eps)).where(deviation_PG != 0, 0.0)


ADVANTAGES["group"] = AdvantageEntry(
    group_advantages,
    formula="reward relative to the group, by `algo.normalize`",
    source="DAPO, Eq. 9",
    by_std=True,
    verl=("grpo", "grpo_vectorized"),
)


def dynamic_sampling_filter(values: Tensor, eps: float = 1e-6) -> Tensor:
    """Whether a group carries a learning signal: `[B, G] → bool [B]`; True keeps the group.

    For booleans (correctness): `0 < correct < G` (Eq. 11). For numbers: a range above `eps`. Pass correctness or raw
    scores, never rewards that include a length penalty: they differ in an all-wrong group with different lengths.
    """
    import torch

    if values.dtype == torch.bool:
        correct_B = values.sum(-1)
        return (correct_B > 0) & (correct_B < values.shape[-1])
    values_BG = values.float()
    return (values_BG.amax(-1) - values_BG.amin(-1)) > eps


def opo_advantages(rewards: Tensor, mask: Tensor | None = None, *, lengths: Tensor) -> Tensor:
    """`R − Σ l R / Σ l` over each group: the baseline of least variance if gradients grow with the length l."""
    rewards_PG, counted_PG = _given(rewards, mask)
    weight_PG = lengths.float().where(counted_PG, 0.0)
    total_P1 = weight_PG.sum(-1, keepdim=True).clamp(min=1)
    baseline_P1 = (weight_PG * rewards_PG.where(counted_PG, 0.0)).sum(-1, keepdim=True) / total_P1
    return (rewards_PG - baseline_P1).where(counted_PG & _varies(rewards_PG, counted_PG), 0.0)


ADVANTAGES["opo"] = AdvantageEntry(
    opo_advantages,
    formula="R − mean of the group's rewards, weighted by length",
    source="[OPO](https://arxiv.org/abs/2505.23585)",
    effect="long samples count more in the baseline, and groups that are about half right have more weight",
    verl=("opo",),
)


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor | None = None, *, lengths: Tensor, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """`(R − mean) / (std + eps)` over all tokens of the step: a sample counts as often as it has tokens."""
    return _over_the_tokens(*_given(rewards, mask), lengths, ddof, eps)


ADVANTAGES["reinforce++"] = AdvantageEntry(
    reinforce_plus_plus,
    formula="(R − mean) / std over all tokens of the step",
    source="[REINFORCE++](https://arxiv.org/abs/2501.03262)",
    effect="samples are compared with those of other prompts, so that hard prompts have negative advantages on average",
    by_std=True,
    alone=True,
    verl=("reinforce_plus_plus",),
)


def reinforce_plus_plus_baseline(
    rewards: Tensor, mask: Tensor | None = None, *, lengths: Tensor, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """REINFORCE++ on the differences to the group's mean."""
    rewards_PG, counted_PG = _given(rewards, mask)
    return _over_the_tokens(_from_the_group(rewards_PG, counted_PG), counted_PG, lengths, ddof, eps)


ADVANTAGES["reinforce++-baseline"] = AdvantageEntry(
    reinforce_plus_plus_baseline,
    formula="d = R − group mean, then (d − mean) / std over all tokens of the step",
    source="[REINFORCE++](https://arxiv.org/abs/2501.03262)",
    effect="groups that are about half right have more weight than lopsided ones",
    by_std=True,
    verl=("reinforce_plus_plus_baseline",),
)


def gdpo_advantages(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    parts: Tensor | None = None,
    part_weights: Tensor | None = None,
    normalize: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """`A = Σ_k w_k · group_advantages(r_k)` over the rewards `parts[P, G, K]`, then `(A − mean) / (std + eps)` over the
    batch. A part that is NaN is not part of its group; without `parts`, there is one, `rewards`."""
    rewards_PG, counted_PG = _given(rewards, mask)
    parts_PGK = rewards_PG[..., None] if parts is None else parts.float()
    weights_PGK = parts_PGK.new_ones(parts_PGK.shape) if part_weights is None else part_weights.float()
    sums_PG = rewards_PG.new_zeros(rewards_PG.shape)
    for part_PG, weight_PG in zip(parts_PGK.unbind(-1), weights_PGK.unbind(-1), strict=True):
        given_PG = counted_PG & ~part_PG.isnan()
        own_PG = part_PG.where(given_PG, 0.0)
        alone_PG = group_advantages(own_PG, normalize=normalize, ddof=ddof, eps=eps, mask=given_PG)
        sums_PG = sums_PG + (weight_PG * alone_PG).where(given_PG, 0.0)
    return _over_the_tokens(sums_PG, counted_PG, sums_PG.new_ones(sums_PG.shape), ddof, eps)


GDPO = "gdpo"
"""The estimator that normalises each reward on its own."""
ADVANTAGES[GDPO] = AdvantageEntry(
    gdpo_advantages,
    formula="each reward relative to the group, by `algo.normalize`; weighted and summed, then (A − mean) / std over "
    "the step",
    source="[GDPO](https://arxiv.org/abs/2601.05242)",
    effect="each reward is normalised on its own before they are summed, so that none drowns in the spread of another",
    by_std=True,
    verl=("gdpo",),
)


def rewards_alone(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """The rewards themselves: GAE with λ = 1 before a critic has learnt anything. The critic's values come later."""
    rewards_PG, counted_PG = _given(rewards, mask)
    return rewards_PG.where(counted_PG, 0.0)


GAE = "gae"
"""The estimator that needs a critic."""
ADVANTAGES[GAE] = AdvantageEntry(
    rewards_alone,
    formula="per token, by the values of a critic: Σ (γ λ)^k δ, by the settings `critic.*`",
    source="[GAE](https://arxiv.org/abs/1506.02438); [VAPO](https://arxiv.org/abs/2504.05118)",
    effect="a critic assigns credit to tokens; samples are not compared with each other",
    alone=True,
    verl=("gae",),
)


def no_advantages(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """0 for every sample; the teacher gives the advantage of each token."""
    return rewards.float() * 0.0


DISTILL = "distill"
"""The estimator that leaves everything to a teacher."""
ADVANTAGES[DISTILL] = AdvantageEntry(
    no_advantages,
    formula="per token: log π_teacher − log π of the policy that sampled it, times `teacher.weight`",
    source="on-policy distillation ([MiniLLM](https://arxiv.org/abs/2306.08543), "
    "[GKD](https://arxiv.org/abs/2306.13649))",
    effect="rewards are not used: the policy learns to write what its teacher would",
    alone=True,
)


def distilled(advantages: Tensor, teacher_logps: Tensor, logps: Tensor, mask: Tensor, *, weight: float) -> Tensor:
    """`A + weight · (log π_teacher − log π)` of each token: the second term estimates the negative reverse KL
    divergence from the teacher, of the token alone."""
    return (advantages.float() + weight * (teacher_logps.float() - logps.float())).where(mask, 0.0)


def _over_the_tokens(values_PG: Tensor, counted_PG: Tensor, lengths: Tensor, ddof: int, eps: float) -> Tensor:
    weight_PG = lengths.float().where(counted_PG, 0.0)
    total = weight_PG.sum()
    mean = (weight_PG * values_PG.where(counted_PG, 0.0)).sum() / total.clamp(min=1)
    centred_PG = (values_PG - mean).where(counted_PG & _varies(values_PG, counted_PG, None), 0.0)
    variance = (weight_PG * centred_PG.square()).sum() / (total - ddof).clamp(min=1)
    return (centred_PG / (variance.sqrt() + eps)).where(centred_PG != 0, 0.0)


def _given(rewards: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rewards in float32, and which of them count."""
    rewards_PG = rewards.float()
    return rewards_PG, rewards_PG.new_ones(rewards_PG.shape).bool() if mask is None else mask.bool()


def _from_the_group(rewards_PG: Tensor, counted_PG: Tensor) -> Tensor:
    """The difference to the mean of the group; 0 outside the mask."""
    total_P1 = rewards_PG.where(counted_PG, 0.0).sum(-1, keepdim=True)
    mean_P1 = total_P1 / counted_PG.sum(-1, keepdim=True).clamp(min=1)
    return (rewards_PG - mean_P1).where(counted_PG & _varies(rewards_PG, counted_PG), 0.0)


def _varies(rewards_PG: Tensor, counted_PG: Tensor, dim: int | None = -1) -> Tensor:
    """Whether the rewards of a group, or of all (`dim` None), differ. If not, division by eps would amplify the
    rounding error of their mean."""
    high, low = rewards_PG.where(counted_PG, -math.inf), rewards_PG.where(counted_PG, math.inf)
    return high.amax(dim, keepdim=True) > low.amin(dim, keepdim=True) if dim is not None else high.max() > low.min()
