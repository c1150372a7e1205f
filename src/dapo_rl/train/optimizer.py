"""Builds the optimizer that the settings name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_rl.config import TrainSettings
from dapo_rl.errors import UserError


def build_optimizer(model: Any, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW over the trainable weights, with weight decay for matrices but not for vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.optimizer == "adamw_8bit":
        return _adamw_8bit(groups, settings)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torchao's, which quantises moments."""
    return hasattr(optimizer, "_new_buffer")


def moments_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """The state of a weight, which the first step would create."""
    moments: dict[str, Tensor] = optimizer.state[weight]
    if moments:
        return moments
    if is_8bit(optimizer):
        zeros: Any = optimizer._new_buffer  # type: ignore[attr-defined]
        moments |= {"step": torch.tensor(0.0), "exp_avg": zeros(weight, True), "exp_avg_sq": zeros(weight, False)}
    else:
        moments["step"] = torch.zeros((), device=weight.device)
        moments["exp_avg"], moments["exp_avg_sq"] = (torch.zeros_like(weight.detach()) for _ in range(2))
    return moments


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a compiled step would treat a number as a constant
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _adamw_8bit(groups: list[dict[str, Any]], settings: TrainSettings) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise UserError("train.optimizer: adamw_8bit needs torchao: pip install torchao; or use adamw") from None
    optimizer = AdamW8bit(groups, lr=settings.lr, betas=settings.betas)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
