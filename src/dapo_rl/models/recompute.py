"""Gradient checkpointing: a layer's activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo_rl.errors import UserError


def check_layers(model: Any) -> None:
    if not _layers(model):
        raise UserError(
            f"train.gradient_checkpointing: {type(model).__name__} has no layers that transformers can compute again; "
            "set it to false"
        )


@contextmanager
def recomputing(model: Any, wanted: bool = True) -> Iterator[None]:
    """Inside, layers keep their inputs alone.

    transformers has a switch for it that works on modules in training mode only, where dropout is on too and
    generation has no cache; the layers' own `forward` is wrapped instead.
    """
    layers = _layers(model) if wanted else []
    # A library that has hooked itself into a layer has put its own `forward` there.
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
