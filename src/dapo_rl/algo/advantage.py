"""Advantages: how much better a sample is than the others of its group. Shapes: B groups × G samples."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import Normalize


def group_advantages(
    rewards: Tensor,
    *,
    normalize: Normalize = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    """`(R − mean) / (std + eps)` over each group of `rewards[B, G]` (Eq. 9).

    `batch` divides by the standard deviation of all rewards instead, `none` does not divide (Dr. GRPO), and
    `leave-one-out` subtracts the mean of the other samples. Samples outside `mask` are not part of any mean and get 0.
    """
    rewards_BG = rewards.float()
    counted_BG = torch.ones_like(rewards_BG, dtype=torch.bool) if mask is None else mask.bool()
    values_BG = torch.where(counted_BG, rewards_BG, 0.0)
    count_B1 = counted_BG.sum(-1, keepdim=True)
    if mask is None and normalize in ("group", "leave-one-out") and rewards_BG.shape[-1] <= max(ddof, 1):
        raise ValueError(f"a group of {rewards_BG.shape[-1]} has no {normalize} normalisation with ddof {ddof}")
    mean_B1 = values_BG.sum(-1, keepdim=True) / count_B1.clamp(min=1)
    deviation_BG = torch.where(counted_BG, rewards_BG - mean_B1, 0.0)
    # A constant group has no deviation; division by eps would amplify the rounding error of its mean.
    high = torch.where(counted_BG, rewards_BG, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(counted_BG, rewards_BG, torch.inf).amin(-1, keepdim=True)
    deviation_BG = torch.where(high > low, deviation_BG, 0.0)
    if normalize == "none":
        return deviation_BG
    if normalize == "leave-one-out":
        return deviation_BG * count_B1 / (count_B1 - 1).clamp(min=1)
    if normalize == "group":
        variance = deviation_BG.square().sum(-1, keepdim=True) / (count_B1 - ddof).clamp(min=1)
    elif normalize == "batch":
        count = counted_BG.sum()
        spread_BG = torch.where(counted_BG, rewards_BG - values_BG.sum() / count.clamp(min=1), 0.0)
        variance = spread_BG.square().sum() / (count - ddof).clamp(min=1)
    else:
        raise ValueError(f"unknown normalize {normalize!r}")
    # With eps = 0, a constant group would give 0 / 0.
    return torch.where(deviation_BG == 0, 0.0, deviation_BG / (variance.sqrt() + eps))
