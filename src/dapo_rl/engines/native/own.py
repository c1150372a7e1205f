"""The engine's own copy of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from dapo_rl.models.load import copy_in
from dapo_rl.models.reserved_memory import ReservedMemory

ALIGNMENT = 16
"""Bytes. Weights whose sizes are multiples of it lie side by side, so that projections can be joined in place."""


def own_model(model: Any, dtype: torch.dtype, copies: bool) -> Any:
    """The model itself if it can sample as it is, otherwise a copy. Buffers (rotary frequencies) keep their dtype.

    Without `copies` the model itself is changed.
    """
    parameter = next(model.parameters())
    if parameter.dtype == dtype and not parameter.is_cuda:
        return model
    if copies:
        return copy_in(model, dtype).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False).eval()


def reserved_model(model: Any, dtype: torch.dtype) -> tuple[Any, ReservedMemory]:
    """A copy whose weights are in memory that can be given up, and that memory."""
    parameters = list(model.parameters())
    # Matrices first: between the projections of one input there must be no bias.
    ordered = sorted(parameters, key=lambda parameter: parameter.dim() < 2)
    sizes = [-(-parameter.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for parameter in ordered]
    memory = ReservedMemory(sum(sizes), parameters[0].device)
    pieces = memory.tensor(torch.uint8, (sum(sizes),)).split(sizes)
    made: dict[int, Any] = {}
    for parameter, piece in zip(ordered, pieces, strict=True):
        weight = piece[: parameter.numel() * dtype.itemsize].view(dtype).view(parameter.shape)
        made[id(parameter)] = torch.nn.Parameter(weight.copy_(parameter.detach()), requires_grad=False)
    return copy.deepcopy(model, made).eval(), memory
