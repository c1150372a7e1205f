"""Importance weights: correct the loss for tokens that another policy sampled.

The *behaviour* policy sampled a token, possibly with older weights, and with the engine's numerics. The *proximal*
policy is the trainer's at the beginning of the step, and the *current* policy is being trained. The decoupled objective
(arXiv 2505.24298) clips the ratio current / proximal and weights each token by proximal / behaviour.
"""

from __future__ import annotations

from torch import Tensor

from dapo_rl.choices import ImportanceMode
from dapo_rl.objectives.aggregation import mask_like, probability_ratio


def importance_weights(
    proximal_logps: Tensor,
    behaviour_logps: Tensor,
    mask: Tensor | None = None,
    *,
    cap: float,
    mode: ImportanceMode = "truncate",
) -> Tensor:
    """`min(exp(proximal − behaviour), cap)` for each token, without a gradient; 1 where masked.

    With the mode `mask`, the weight of a token above the cap is 0.
    """
    keep = mask_like(proximal_logps, mask)
    ratio = probability_ratio(proximal_logps, behaviour_logps, keep).detach()
    if mode == "truncate":
        weights = ratio.clamp(max=cap)
    elif mode == "mask":
        weights = ratio.where(ratio <= cap, 0.0)
    else:
        raise ValueError(f"unknown importance mode {mode!r}")
    return weights.where(keep, 1.0)


def above_cap(proximal_logps: Tensor, behaviour_logps: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Mask of the tokens whose ratio proximal / behaviour is above the cap."""
    return (probability_ratio(proximal_logps, behaviour_logps, mask) > cap) & mask
