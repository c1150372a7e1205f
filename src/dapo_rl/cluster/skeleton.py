"""A model without its weights: what a process needs, apart from them, to have the same model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dapo_rl.models.load import take_over
from dapo_rl.models.weights import WeightSource


def skeleton_of(model: Any) -> Any:
    """A copy of the model whose parameters have no memory."""
    bare: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for weight in model.parameters()
    }
    skeleton = copy.deepcopy(model, bare)
    for module in skeleton.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.cpu()
    return skeleton


def flesh_out(skeleton: Any, source: WeightSource, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Gives a skeleton memory on the device, and the weights of the source; `dtype` is the type of the weights, if it
    is not that of the model. Tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in skeleton.modules():
        for name, bare in module._parameters.items():
            if bare is None:
                continue
            if id(bare) not in made:
                kind = dtype if dtype is not None and bare.is_floating_point() else bare.dtype
                made[id(bare)] = nn.Parameter(torch.empty(bare.shape, dtype=kind, device=device), requires_grad=False)
            module._parameters[name] = made[id(bare)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    take_over(skeleton, source)
    return skeleton.eval()
