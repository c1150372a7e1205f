"""Token losses. Shapes: B samples × T tokens, or T tokens of one sample; a mask is True where a response token counts.

A loss is `f(new_logps, old_logps, advantages, mask, *, clip_low, clip_high, clip_ratio_c)`; it returns the loss of each
token, 0 where masked. It may leave out settings that it does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

RatioOf = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""The ratio that the clip bounds apply to, for each token, from new and old log-probabilities and the mask."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this, as in verl: beyond 88 the ratio overflows, and the gradient becomes NaN."""


class TokenLosses(Protocol):
    """Computes token losses `[B, T]`, 0 where masked, which the aggregation then reduces to one number."""

    def __call__(
        self,
        new_logps: Tensor,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        clip_ratio_c: float | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LossEntry:
    function: Callable[..., Tensor]
    formula: str
    """What is minimised, without the sign. r is the ratio of a token, s of a sequence, A the advantage."""
    source: str
    effect: str = ""
    """How it differs from DAPO's, for `dapo check`."""
    ratio: RatioOf | None = None
    """None: the ratio of each token."""
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
    """The `loss_type` of TRL and ms-swift that gives it; there, `epsilon_high` is the upper bound itself."""

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
    level=("sequence_token",),
)


def cispo_losses(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """`−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π`: the clipped ratio is a weight without a gradient, so every
    token contributes. With `clip_low` 1 or more there is no lower bound."""
    weight = probability_ratio(new_logps, old_logps, mask).clamp(1 - clip_low, 1 + clip_high).detach()
    advantage = advantages_like(weight, advantages, mask)
    return -weight * advantage * new_logps.float().where(mask, 0.0)


LOSSES["cispo"] = LossEntry(
    cispo_losses,
    formula="clip(r) A log π, without a gradient of clip(r)",
    source="[CISPO](https://arxiv.org/abs/2506.13585)",
    effect="tokens beyond the bounds keep their gradient, with a bounded weight",
    wide_bounds=True,
    verl=("cispo",),
    trl=("cispo",),
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


def _clipped(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return (ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
