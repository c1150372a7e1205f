"""Gradient checkpointing: recomputes a layer's activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo_rl.errors import UserError


def can_recompute(model: Any) -> bool:
    return bool(layers_of(model))


def check_layers(model: Any) -> None:
    if not can_recompute(model):
        raise UserError(
            f"train.gradient_checkpointing: {type(model).__name__} has no layers that transformers can recompute; "
            "set it to false"
        )


@contextmanager
def recomputing(model: Any, wanted: bool = True) -> Iterator[None]:
    """Inside, layers keep only their inputs.

    transformers' own switch works in training mode only, which also enables dropout and disables the cache of
    generation, so the `forward` of each layer is wrapped instead.
    """
    layers = layers_of(model) if wanted else []
    # Dropout needs the same masks again.
    random = any(isinstance(module, nn.Dropout) and module.training and module.p for module in model.modules())
    forwards = {
        layer: partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=random) for layer in layers
    }
    with forwards_replaced(forwards):
        yield


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, modules have other forward passes. A library that hooks into a module may have set its `forward`, which
    it gets back."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def layers_of(model: Any) -> list[Any]:
    """The decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
