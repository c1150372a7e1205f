"""Comparison of a replacement with the original, on random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def agree(a: Tensor, b: Any) -> bool:
    """Whether two tensors are equal up to a few rounding errors at the scale of the tensor's RMS value."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    step = 4 * max(torch.finfo(b.dtype).eps, 1e-5)
    scale = b.double().pow(2).mean().sqrt().item()
    return torch.allclose(a.double(), b.double(), rtol=step, atol=step * scale)


def random_like(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Normal random numbers from a separate generator, so that the global one is not advanced."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.to(like.device, like.dtype)
