"""Importance weights: correct the loss for tokens that another policy sampled.

The *behaviour* policy sampled a token, possibly with older weights, and with the engine's numerics. The *proximal*
policy is the trainer's at the beginning of the step, and the *current* policy is being trained. The decoupled objective
(arXiv 2505.24298) clips the ratio current / proximal and weights each token by proximal / behaviour.

All functions take B samples × T tokens, or the tokens of one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import ImportanceLevel, ImportanceMode
from dapo_rl.objectives.aggregation import mask_like
from dapo_rl.objectives.losses import MAX_LOG_RATIO, advantages_like, probability_ratio

LEAST_MEAN = 1e-8
"""Weights with a smaller mean are not normalised."""


def importance_ratio(
    proximal_logps: Tensor, behaviour_logps: Tensor, mask: Tensor | None = None, level: ImportanceLevel = "token"
) -> Tensor:
    """`exp(proximal − behaviour)` of each token, or the product over the tokens of its sample; 1 where masked.

    Logarithms are clamped to ±20.
    """
    keep = mask_like(proximal_logps, mask)
    if level == "token":
        return probability_ratio(proximal_logps, behaviour_logps, keep).detach()
    if level != "sequence":
        raise ValueError(f"unknown importance level {level!r}")
    product = _log_ratio(proximal_logps, behaviour_logps, keep).sum(-1, keepdim=True)
    return product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(keep).where(keep, 1.0)


def importance_weights(
    proximal_logps: Tensor,
    behaviour_logps: Tensor,
    mask: Tensor | None = None,
    *,
    cap: float,
    floor: float = 0.0,
    mode: ImportanceMode = "truncate",
    level: ImportanceLevel = "token",
) -> Tensor:
    """The ratio proximal / behaviour of each token or sample, between `floor` and `cap`, without a gradient; 1 where
    masked.

    With the mode `mask`, the weight of a ratio that is out of bounds is 0.
    """
    ratio = importance_ratio(proximal_logps, behaviour_logps, mask, level)
    if mode == "truncate":
        weights = ratio.clamp(floor, cap)
    elif mode == "mask":
        weights = ratio.where((ratio >= floor) & (ratio <= cap), 0.0)
    else:
        raise ValueError(f"unknown importance mode {mode!r}")
    return weights.where(mask_like(ratio, mask), 1.0)


def above_cap(
    proximal_logps: Tensor, behaviour_logps: Tensor, mask: Tensor, cap: float, level: ImportanceLevel = "token"
) -> Tensor:
    """Mask of the tokens whose ratio proximal / behaviour is above the cap."""
    return (importance_ratio(proximal_logps, behaviour_logps, mask, level) > cap) & mask


def off_policy_mask(
    new_logps: Tensor, behaviour_logps: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """The tokens with a negative advantage in samples whose mean of log behaviour − log current is above the threshold
    (DeepSeek-V3.2, arXiv 2512.02556). They have no loss; the mask has no gradient."""
    log_ratio = _log_ratio(behaviour_logps, new_logps, mask).detach()
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean > threshold) & (advantages_like(log_ratio, advantages, mask) < 0) & mask


def weight_scale(weights: Tensor) -> Tensor:
    """What brings the mean of the weights to 1; 1 if they are all 0."""
    mean = weights.double().mean()
    return torch.where(mean > LEAST_MEAN, 1 / mean, 1.0)


def effective_sample_size(weights: Tensor) -> Tensor:
    """`mean(w)² / mean(w²)`, between 0 and 1: the share of the samples that are as good as on-policy ones; 0 if all
    weights are 0."""
    w = weights.double()
    return w.mean().square() / w.square().mean().clamp(min=LEAST_MEAN**2)


def chi_squared(ratios: Tensor) -> Tensor:
    """`mean(r²) − 1`, an estimate of χ²(proximal ‖ behaviour) from samples of the latter."""
    return ratios.double().square().mean() - 1


def _log_ratio(logps: Tensor, other_logps: Tensor, mask: Tensor) -> Tensor:
    return (logps.float() - other_logps.float()).where(mask, 0.0).detach()
