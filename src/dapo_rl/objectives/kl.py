"""Per-token estimators of the KL divergence to a reference, and the entropy of the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_rl.choices import KLKind

MAX_EXPONENT = 20.0
"""Bound of the exponent in k3, which overflows beyond 88. In the other direction k3 is linear and needs no bound."""


def kl_penalty(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) at sampled tokens (k3: unbiased and never negative).

    An unbiased value does not have an unbiased gradient: over tokens that the policy samples, the gradient of k1 is 0
    in expectation, that of k2 is the gradient of KL(policy ‖ reference), and that of k3 the gradient of
    KL(reference ‖ policy). `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2 (straight-through).

    k3 bounds the probability ratio reference / policy at `exp(20)`.
    """
    difference = ref_logps.float() - logps.float()
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        # In float32 the terms cancel: of a difference of 0.001, a quarter of the value would be rounding.
        bounded = difference.clamp(max=MAX_EXPONENT).double()
        return (torch.expm1(bounded) - bounded).float()
    if kind == "k1+" or kind == "k3+":
        learnt = difference.square() / 2
        return learnt - learnt.detach() + kl_penalty(logps, ref_logps, "k1" if kind == "k1+" else "k3").detach()
    raise ValueError(f"unknown kl kind {kind!r}")


def unbiased_kl(logps: Tensor, ref_logps: Tensor, behaviour_logps: Tensor, kind: KLKind = "k3") -> Tensor:
    """The estimate times the probability ratio of the policy to the one that sampled the token (DeepSeek-V3.2).

    The ratio has a gradient, which is what the policy gains by sampling other tokens: over tokens of any policy, those
    of k1 and k3 are the gradient of KL(policy ‖ reference) in expectation. The logarithm of the ratio is bounded to
    ±20.
    """
    log_ratio = logps.float() - behaviour_logps.float()
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp() * kl_penalty(logps, ref_logps, kind)


def sample_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values[B, T]` over the tokens of each sample; 0 for a sample without tokens."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of `softmax(logits)` over the last dimension; a logit of −inf is an impossible token."""
    logps = torch.log_softmax(logits.float(), dim=-1)
    return -(logps.exp() * torch.where(logps.isinf(), 0.0, logps)).sum(-1)
