"""Per-token estimators of the KL divergence to a reference, and the entropy of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import KLKind

MAX_EXPONENT = 20.0
"""k3's exponential ends here: beyond 88 it is infinite. Its other side is a straight line and needs no bound."""


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k3") -> Tensor:
    """KL(policy ‖ reference) of sampled tokens, each estimated by itself (k3: unbiased and never negative).

    A token that the reference gives more than `exp(20)` times the policy's probability counts in k3 as at that bound.
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
