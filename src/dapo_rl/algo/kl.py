"""Per-token estimators of the KL divergence to a reference, and the entropy of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import KLKind

MAX_EXPONENT = 20.0
"""Bound of the exponent in k3, which overflows beyond 88. In the other direction k3 is linear and needs no bound."""


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) at sampled tokens (k3: unbiased and never negative).

    k3 bounds the probability ratio reference / policy at `exp(20)`.
    """
    difference = ref_logps.float() - logps.float()
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        bounded = difference.clamp(max=MAX_EXPONENT)
        return torch.exp(bounded) - bounded - 1
    raise ValueError(f"unknown kl kind {kind!r}")


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of `softmax(logits)` over the last dimension; a logit of −inf is an impossible token."""
    logps = torch.log_softmax(logits.float(), dim=-1)
    return -(logps.exp() * torch.where(logps.isinf(), 0.0, logps)).sum(-1)
