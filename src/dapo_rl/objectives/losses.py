"""Token losses. Shapes: B samples × T tokens, or T tokens of one sample; a mask is True where a response token counts.

A loss is `f(new_logps, old_logps, advantages, mask, *, clip_low, clip_high, clip_ratio_c)`; it returns the loss of each
token, 0 where masked. It may leave out settings that it does not use, and take others of `algo` and columns by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RatioOf = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""The ratio that the clip bounds apply to, for each token, from new and old log-probabilities and the mask."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this, as in verl: beyond 88 the ratio overflows, and the gradient becomes NaN."""

TokenLosses = Callable[..., "Tensor"]
"""Computes token losses `[B, T]`, 0 where masked, which the aggregation then reduces to one number."""


@dataclass(frozen=True, slots=True)
class LossEntry:
    function: Callable[..., Tensor]
    formula: str
    """What is minimised, without the sign. r is the ratio of a token, s of a sequence, A the advantage."""
    source: str
    effect: str = ""
    """How it differs from DAPO's, for `dapo check`."""
    ratio: RatioOf | None = None
    """None: the ratio of each token. A loss that bounds something else gives 1 + what it bounds."""
    per_sequence: bool = False
    """Whether the ratio is that of a whole sequence."""
    by_covariance: bool = False
    """Whether it takes `cov_mask`, the tokens selected by their covariance."""
    wide_bounds: bool = False
    """Whether the bounds can be 1 and above; otherwise they are in [0, 1)."""
    dual_clip: bool = False
    """Whether `algo.clip_ratio_c` applies."""
    verl: tuple[str | None, ...] = ()
    """verl's names for it, in `actor.policy_loss.loss_mode`."""
    verl_aggregation: str | None = None
    """The `algo.aggregation` that verl fixes for it, whatever its `loss_agg_mode` is."""
    level: tuple[str | None, ...] = ()
    """The `importance_sampling_level` of TRL, ms-swift and AReaL that gives it."""
    trl: tuple[str, ...] = ()
    """The `loss_type` of TRL and ms-swift that gives it; for wide bounds, `epsilon_high` there is the upper bound
    itself."""
    trl_aggregation: str = "token-mean"
    """The `algo.aggregation` that this `loss_type` has."""

    @property
    def ratio_of(self) -> RatioOf:
        return self.ratio or probability_ratio


LOSSES: dict[str, LossEntry] = {}
"""`algo.loss` also accepts a user-defined function."""


def losses_by(names_of: Callable[[LossEntry], tuple[str | None, ...]]) -> dict[str | None, str]:
    """The name here of each name in another library."""
    return {theirs: ours for ours, entry in LOSSES.items() for theirs in names_of(entry)}


def policy_token_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """`−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)` for each token; 0 where masked.

    The ratio r = `exp(new − old)` is clamped to [`exp(−20)`, `exp(20)`]; outside it, a token has no gradient.
    """
    ratio = probability_ratio(new_logps, old_logps, mask)
    advantage = advantages_like(ratio, advantages, mask)
    objective = _clipped(ratio, advantage, clip_low, clip_high)
    if clip_ratio_c is not None:
        objective = objective.maximum(clip_ratio_c * advantage).where(advantage < 0, objective)
    return -objective * mask


LOSSES["dapo"] = LossEntry(
    policy_token_losses,
    formula="min(r A, clip(r) A)",
    source="DAPO, Eq. 8",
    dual_clip=True,
    verl=("vanilla", None),
    level=("token", None),
)


def gspo_losses(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """DAPO's objective with one ratio for a whole sequence, s = `exp(mean(new − old))`, so that all of it is clipped or
    none. The gradient reaches every token through the mean."""
    ratio = sequence_ratio(new_logps, old_logps, mask)
    return -_clipped(ratio, advantages_like(ratio, advantages, mask), clip_low, clip_high) * mask


def sequence_ratio(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`exp(mean(new − old))` over the tokens of each sample, the geometric mean of their ratios; 1 where masked."""
    return _sequence_log_ratio(new_logps, old_logps, mask).exp().expand_as(new_logps).where(mask, 1.0)


LOSSES["gspo"] = LossEntry(
    gspo_losses,
    formula="min(s A, clip(s) A), s the geometric mean of r over the sequence",
    source="[GSPO](https://arxiv.org/abs/2507.18071)",
    effect="a sequence is clipped as a whole; s varies less than r, so the bounds are 0.0003 and 0.0004 in its paper",
    ratio=sequence_ratio,
    per_sequence=True,
    verl=("gspo",),
    verl_aggregation="seq-mean-token-mean",
    level=("sequence",),
)


def gspo_token_losses(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO with the value of s and the gradient of the token's own log-probability: `sg(s)·π / sg(π)`.

    The same gradient as `gspo_losses` if a sample has one advantage; tokens may have their own."""
    new = new_logps.float().where(mask, 0.0)
    log_ratio = _sequence_log_ratio(new_logps, old_logps, mask).detach()
    ratio = (new - new.detach() + log_ratio).exp()
    return -_clipped(ratio, advantages_like(ratio, advantages, mask), clip_low, clip_high) * mask


LOSSES["gspo-token"] = LossEntry(
    gspo_token_losses,
    formula="min(s A, clip(s) A), with the gradient of each token's own r",
    source="[GSPO](https://arxiv.org/abs/2507.18071), Sec. 4.3",
    effect="as gspo, for advantages that differ between the tokens of a sequence",
    ratio=sequence_ratio,
    per_sequence=True,
    level=("sequence_token",),
)


def cispo_losses(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π`: the clipped ratio is a weight without a gradient, so every
    token contributes. With `clip_low` 1 or more there is no lower bound."""
    weight = probability_ratio(new_logps, old_logps, mask).clamp(1 - clip_low, 1 + clip_high)
    return _policy_gradient(weight, new_logps, advantages, mask)


LOSSES["cispo"] = LossEntry(
    cispo_losses,
    formula="clip(r) A log π, without a gradient of clip(r)",
    source="[CISPO](https://arxiv.org/abs/2506.13585)",
    effect="tokens beyond the bounds keep their gradient, with a bounded weight",
    wide_bounds=True,
    verl=("cispo",),
    trl=("cispo",),
)


def sapo_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Tensor:
    """`−(4/τ)·sigmoid(τ·(r − 1))·A`: a gate that closes smoothly away from r = 1, where its slope is 1; τ is `tau_pos`
    where A > 0, otherwise `tau_neg`."""
    ratio = probability_ratio(new_logps, old_logps, mask)
    advantage = advantages_like(ratio, advantages, mask)
    positive, negative = ((tau * (ratio - 1)).sigmoid() * (4 / tau) for tau in (tau_pos, tau_neg))
    return -positive.where(advantage > 0, negative) * advantage * mask


LOSSES["sapo"] = LossEntry(
    sapo_losses,
    formula="(4/τ) sigmoid(τ (r − 1)) A, τ = `algo.tau_pos` where A > 0, otherwise `algo.tau_neg`",
    source="[SAPO](https://arxiv.org/abs/2511.20347)",
    effect="tokens away from the old policy learn less and less, smoothly; there are no bounds",
    verl=("sapo",),
    verl_aggregation="seq-mean-token-mean",
    trl=("sapo",),
    trl_aggregation="seq-mean-token-mean",
)


def gmpo_losses(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`−A·exp(mean(x))` with x the log-ratio of each token, at most `clip_high` where A > 0 and at least `−clip_low`
    where A < 0."""
    log_ratio = (new_logps.float() - old_logps.float()).where(mask, 0.0)
    advantage = advantages_like(log_ratio, advantages, mask)
    bounded = log_ratio.clamp(max=clip_high).where(advantage > 0, log_ratio.clamp(min=-clip_low))
    mean = bounded.where(advantage != 0, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return -advantage * mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * mask


def bounded_log_ratio(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`1 + log r`, so that GMPO's bounds of the log-ratio are bounds of this around 1; 1 where masked."""
    return 1 + (new_logps.float() - old_logps.float()).where(mask, 0.0)


LOSSES["gmpo"] = LossEntry(
    gmpo_losses,
    formula="A exp(mean(clip(log r))) over the sequence, log r limited to −clip_low … clip_high",
    source="[GMPO](https://arxiv.org/abs/2507.20673)",
    effect="a sequence has the geometric mean of its ratios, each limited by itself; the bounds are 0.4 in its paper",
    ratio=bounded_log_ratio,
    wide_bounds=True,
    verl=("geo_mean",),
    verl_aggregation="seq-mean-token-mean",
)


def dppo_tv_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """`−sg(min(r, clip_ratio_c))·A·log π`, and 0 for a token that has already moved too far in the direction of its
    advantage: its probability by more than `clip_high` up, or `clip_low` down."""
    within = _within(probability_change(new_logps, old_logps, mask), advantages, mask, clip_low, clip_high)
    weight = probability_ratio(new_logps, old_logps, mask).clamp(max=math.inf if clip_ratio_c is None else clip_ratio_c)
    return _policy_gradient(weight, new_logps, advantages, mask) * within


def probability_change(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`1 + π − π_old` of each token; the difference is the total variation between the two, if all other tokens count
    as one. 1 where masked."""
    new, old = (logps.float().where(mask, 0.0) for logps in (new_logps, old_logps))
    return 1 + (new.exp() - old.exp())


LOSSES["dppo-tv"] = LossEntry(
    dppo_tv_losses,
    formula="r A log π, without a gradient of r, while π − π_old is within −clip_low … clip_high",
    source="[DPPO](https://arxiv.org/abs/2602.04879)",
    effect="the change of a probability is bounded instead of its ratio, so rare tokens have more room",
    ratio=probability_change,
    dual_clip=True,
    verl=("dppo_tv",),
)


def dppo_kl_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
) -> Tensor:
    """As `dppo_tv_losses`, with the KL divergence of the token against all others instead of the difference."""
    within = _within(binary_divergence(new_logps, old_logps, mask), advantages, mask, clip_low, clip_high)
    weight = probability_ratio(new_logps, old_logps, mask).clamp(max=math.inf if clip_ratio_c is None else clip_ratio_c)
    return _policy_gradient(weight, new_logps, advantages, mask) * within


def binary_divergence(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`1 ± KL(old ‖ new)` of the token against all others as one, with the sign of the change of its probability; 1
    where masked."""
    new, old = (logps.float().where(mask, 0.0).clamp(max=0.0) for logps in (new_logps, old_logps))
    others, others_old = (1e-8 - logps.expm1() for logps in (new, old))
    divergence = old.exp() * (old - new) + (1 - old.exp()) * (others_old / others).log()
    return 1 + divergence * (new - old).sign()


LOSSES["dppo-kl"] = LossEntry(
    dppo_kl_losses,
    formula="r A log π, without a gradient of r, while ± KL(π_old ‖ π) of the token is within −clip_low … clip_high",
    source="[DPPO](https://arxiv.org/abs/2602.04879)",
    effect="the divergence of a token against all others is bounded instead of its ratio",
    ratio=binary_divergence,
    dual_clip=True,
    verl=("dppo_kl",),
)


def clip_cov_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cov_mask: Tensor | None = None,
) -> Tensor:
    """DAPO's objective without the tokens of `cov_mask`."""
    losses = policy_token_losses(new_logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return losses if cov_mask is None else losses * ~cov_mask


LOSSES["clip-cov"] = LossEntry(
    clip_cov_losses,
    formula="min(r A, clip(r) A), and 0 for a few tokens with a large covariance of log π and A",
    source="[Clip-Cov](https://arxiv.org/abs/2505.22617)",
    effect="the tokens that lower entropy most, `algo.cov_share` of all, are left out, at random between two bounds",
    by_covariance=True,
    verl=("clip_cov",),
)


def kl_cov_losses(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_mask: Tensor | None = None,
    kl_cov_coef: float = 1.0,
) -> Tensor:
    """`−r·A`, and for the tokens of `cov_mask` `−r·A + kl_cov_coef·|log r|`."""
    ratio = probability_ratio(new_logps, old_logps, mask)
    losses = -ratio * advantages_like(ratio, advantages, mask) * mask
    if cov_mask is None:
        return losses
    distance = (new_logps.float() - old_logps.float()).where(mask & cov_mask, 0.0).abs()
    return losses + kl_cov_coef * distance


LOSSES["kl-cov"] = LossEntry(
    kl_cov_losses,
    formula="r A, less `algo.kl_cov_coef` times the size of log r for the few tokens of largest covariance",
    source="[KL-Cov](https://arxiv.org/abs/2505.22617)",
    effect="nothing is clipped; the tokens that lower entropy most, `algo.cov_share` of all, are held back",
    by_covariance=True,
    verl=("kl_cov",),
)


def probability_ratio(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """`exp(new − old)`, clamped to [`exp(−20)`, `exp(20)`]; 1 where masked."""
    # Zero masked positions before the exponential: 0 × NaN is NaN, in the gradient too.
    log_ratio = (new_logps.float() - old_logps.float()).where(mask, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def advantages_like(ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Expands advantages per token or per sample to the shape of `ratio`."""
    per_token = advantages.float()
    if per_token.dim() == 1 and ratio.dim() == 2:
        per_token = per_token[:, None]
    return per_token.expand_as(ratio).where(mask, 0.0)


def _sequence_log_ratio(new_logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    log_ratio = (new_logps.float() - old_logps.float()).where(mask, 0.0)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _within(moved: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The tokens that have not moved out of the bounds around 1 in the direction of A."""
    advantage = advantages_like(moved, advantages, mask)
    return (moved <= 1 + clip_high).where(advantage > 0, moved >= 1 - clip_low)


def _policy_gradient(weight: Tensor, new_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """`−sg(weight)·A·log π`"""
    advantage = advantages_like(weight, advantages, mask)
    return -weight.detach() * advantage * new_logps.float().where(mask, 0.0)


def _clipped(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return (ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
