"""Rejection: leaves out tokens and samples that are too unlikely, or too likely, under the proximal policy.

A rejected token has no loss and is not in the denominator, as if it had not been sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dapo_rl.choices import Rejection
from dapo_rl.objectives.importance import importance_ratio
from dapo_rl.objectives.kl import kl_penalty

Bound = float | tuple[float, float]
"""One bound, or the lowest and the highest value that is kept."""


def rejected_tokens(
    proximal_logps: Tensor, behaviour_logps: Tensor, mask: Tensor, bounds: Mapping[Rejection, Bound]
) -> Tensor:
    """The tokens of the mask that any of the statistics rejects, of B samples × T tokens or of one sample."""
    rejected = torch.zeros_like(mask)
    for statistic, bound in bounds.items():
        rejected = rejected | _rejected_by(statistic, bound, proximal_logps, behaviour_logps, mask)
    return rejected & mask


def _rejected_by(statistic: Rejection, bound: Bound, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    low, high = bound if isinstance(bound, tuple) else (bound, bound)
    ratio = importance_ratio(proximal, behaviour, mask)
    tokens = mask.sum(-1, keepdim=True).clamp(min=1)
    if statistic == "veto":
        return ((ratio < low) & mask).any(-1, keepdim=True)
    if statistic == "k3":
        k3 = kl_penalty(behaviour, proximal, "k3").where(mask, 0.0)
        return k3.sum(-1, keepdim=True) / tokens > high
    if statistic == "geometric":
        ratio = (ratio.log().sum(-1, keepdim=True) / tokens).exp()
    elif statistic == "product":
        ratio = importance_ratio(proximal, behaviour, mask, "sequence")
    elif statistic != "token":
        raise ValueError(f"unknown statistic {statistic!r}")
    return (ratio < low) | (ratio > high)
