"""Length penalties: Soft Overlong Punishment (Eq. 13), and the linear form."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong_punishment(lengths: Tensor, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """Eq. 13, added to the reward: 0 up to `max − cache`, then linear down to `−factor` at `max` and beyond.

    `cache_length=0` is a hard step: 0 up to `max_length`, `−factor` beyond it.
    """
    lengths = lengths.float()
    if cache_length == 0:
        return torch.where(lengths > max_length, -factor, 0.0)
    return ((max_length - cache_length - lengths) / cache_length).clamp(-1.0, 0.0) * factor


def overlong_reward_shaping(rewards: Tensor, lengths: Tensor, max_length: int, penalty_weight: float = 0.1) -> Tensor:
    """`reward − weight · (length − max) / max` beyond `max_length`; shorter samples keep their reward. Unbounded."""
    excess = (lengths.float() - max_length).clamp(min=0.0) / max_length
    return rewards.float() - penalty_weight * excess
