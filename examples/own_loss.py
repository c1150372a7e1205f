"""A custom loss and a custom advantage function.

    dapo train algo.loss=examples/own_loss.py:cispo train.steps=2
    dapo train algo.advantage=examples/own_loss.py:against_the_batch train.steps=2

Shapes: B samples × T tokens of a micro-batch; P groups × G samples of a step.
"""

import torch
from torch import Tensor


def cispo(
    new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, *, clip_high: float, **settings: object
) -> Tensor:
    """CISPO (MiniMax-M1): the clipped ratio is a weight without a gradient, so every token contributes."""
    weights = torch.exp((new_logps - old_logps).clamp(max=20)).clamp(max=1 + clip_high).detach()
    return -weights * advantages * new_logps


def against_the_batch(rewards: Tensor, mask: Tensor) -> Tensor:
    """Normalises rewards over the whole step instead of each group."""
    counted = rewards[mask]
    return (rewards - counted.mean()) / (counted.std() + 1e-6) if len(counted) > 1 else torch.zeros_like(rewards)
