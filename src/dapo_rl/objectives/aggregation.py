"""The policy loss of DAPO, the aggregation of token losses into one number, and which tokens are clipped.

Shapes: T tokens, or B samples × T positions; a mask is True where a response token counts.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_rl.choices import Aggregation
from dapo_rl.objectives.losses import RatioOf, advantages_like, policy_token_losses, probability_ratio


class ClipFractions(NamedTuple):
    """Fractions of tokens whose gradient is clipped."""

    high: Tensor
    """Positive advantage, ratio above 1 + clip_high."""
    low: Tensor
    """Negative advantage, ratio below 1 − clip_low."""
    dual: Tensor
    """Negative advantage, ratio above clip_ratio_c."""


def dapo_policy_loss(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_ratio_c: float | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    group_tokens: Tensor | None = None,
    norm_length: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The loss of DAPO (Eq. 8) for `[T]` or `[B, T]` inputs: a scalar to minimise.

    `weights` multiply the token losses (see `importance_weights`). `denominator` overrides the count that the
    aggregation divides by (see `aggregate`), so that the losses of micro-batches and ranks add up to the loss of the
    optimizer step.
    """
    keep = mask_like(new_logps, mask)
    losses = policy_token_losses(
        new_logps, old_logps, advantages, keep, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c
    )
    losses = losses if weights is None else losses * weights
    return aggregate(losses, keep, aggregation, denominator, group_tokens=group_tokens, norm_length=norm_length)


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "token-mean",
    denominator: float | Tensor | None = None,
    *,
    group_tokens: Tensor | None = None,
    norm_length: int | None = None,
) -> Tensor:
    """Reduces per-token values to one number.

    | aggregation | weight of a token | `denominator` counts |
    |---|---|---|
    | token-mean | 1 | tokens |
    | token-mean-per-group | 1 / tokens of its group (`group_tokens`, `[B]`; by default all are one group) | groups |
    | seq-mean-token-mean | 1 / tokens of its sample | samples |
    | seq-mean-token-sum-norm | 1 / `norm_length`, a constant (by default the width T) | samples |
    | micro-batch-token-mean | 1 / tokens of this call | micro-batches |

    A sample without tokens is not counted.
    """
    values_BT, mask_BT = torch.atleast_2d(values.float()), torch.atleast_2d(mask)
    masked_BT = torch.where(mask_BT, values_BT, 0.0)
    tokens_B = mask_BT.sum(-1)
    samples = (tokens_B > 0).sum()
    if aggregation == "token-mean":
        total, count = masked_BT.sum(), tokens_B.sum()
    elif aggregation == "token-mean-per-group":
        group_tokens_B = tokens_B.sum().expand_as(tokens_B) if group_tokens is None else group_tokens.to(tokens_B)
        weight_B = 1.0 / group_tokens_B.clamp(min=1)
        total, count = (masked_BT.sum(-1) * weight_B).sum(), (tokens_B * weight_B).sum()
    elif aggregation == "seq-mean-token-mean":
        total, count = (masked_BT.sum(-1) / tokens_B.clamp(min=1)).sum(), samples
    elif aggregation == "seq-mean-token-sum-norm":
        total, count = masked_BT.sum() / (norm_length or mask_BT.shape[-1]), samples
    elif aggregation == "micro-batch-token-mean":
        warnings.warn(
            "micro-batch-token-mean weights tokens by the size of their micro-batch, so the gradient depends on how "
            "the batch is split; token-mean avoids this",
            stacklevel=2,
        )
        total, count = masked_BT.sum() / tokens_B.sum().clamp(min=1), torch.ones((), device=values.device)
    else:
        raise ValueError(f"unknown aggregation {aggregation!r}")
    # Without tokens the result is 0, with a gradient of 0.
    smallest = torch.finfo(torch.float32).tiny
    divisor = count.clamp(min=smallest) if denominator is None else denominator
    return total / divisor


def clip_fractions(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_ratio_c: float | None = None,
) -> ClipFractions:
    keep = mask_like(new_logps, mask)
    clipped = clipped_tokens(
        new_logps, old_logps, advantages, keep, clip_low=clip_low, clip_high=clip_high, clip_ratio_c=clip_ratio_c
    )
    return ClipFractions(*(tokens.sum() / keep.sum().clamp(min=1) for tokens in clipped))


def clipped_tokens(
    new_logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None = None,
    ratio_of: RatioOf = probability_ratio,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the tokens clipped at the upper bound, at the lower bound, and by dual clip.

    `ratio_of` computes the ratio that the bounds apply to; by default it is that of each token.
    """
    ratio = ratio_of(new_logps, old_logps, mask)
    advantage = advantages_like(ratio, advantages, mask)
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    dual = (advantage < 0) & (ratio > (clip_ratio_c if clip_ratio_c is not None else torch.inf))
    return high & mask, low & mask, dual & mask


def mask_like(logps: Tensor, mask: Tensor | None) -> Tensor:
    """The mask in the shape of `logps`; None masks nothing."""
    return torch.ones_like(logps, dtype=torch.bool) if mask is None else mask.bool().expand_as(logps)
