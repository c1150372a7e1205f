"""A model without its weights: what a process needs, apart from them, to have the same model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from dapo_rl.models.load import take_over
from dapo_rl.models.weights import WeightSource


def skeleton_of(model: Any) -> Any:
    """A copy of the model whose parameters have no memory; buffers (rotary frequencies) are on the host."""
    if any(buffer.is_meta for buffer in model.buffers()):  # they are computed when a model is built
        with no_init_weights(), _bare_parameters():
            skeleton = type(model)(model.config)
        skeleton.tie_weights()
        for name, buffer in model.named_buffers():
            if not buffer.is_meta:  # it was read from a file
                skeleton.get_buffer(name).copy_(buffer)
        skeleton.generation_config = copy.deepcopy(model.generation_config)
        return skeleton
    bare: dict[int, Any] = {id(weight): _bare(weight) for weight in model.parameters()}
    skeleton = copy.deepcopy(model, bare)
    for module in skeleton.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.cpu()
    return skeleton


def _bare(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


@contextmanager
def _bare_parameters() -> Iterator[None]:
    """Models that are built meanwhile have parameters without memory."""
    register = nn.Module.register_parameter

    def register_bare(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        register(module, name, weight if weight is None or weight.is_meta else _bare(weight))

    nn.Module.register_parameter = register_bare  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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
