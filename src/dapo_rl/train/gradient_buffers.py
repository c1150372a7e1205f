"""Gradients that are allocated before the forward pass.

Autograd allocates them during the backward pass, in the memory of activations that it has just freed. They split that
memory into pieces that the next micro-batch cannot use. That matters only where memory is short.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Gradients:
    """The gradients of a model's trained parameters. Those that no loss depends on become None again."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        used = self._used = set[int]()
        """The ids of the parameters that a backward pass has added to."""
        for parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(lambda p: used.add(id(p)))
            weakref.finalize(self, hook.remove)

    def allocate(self) -> None:
        self._used.clear()
        missing = [p for p in self._parameters if p.grad is None]
        if len(missing) == len(self._parameters):
            # A gradient within a larger piece of cached memory would keep torch from freeing the whole piece.
            torch.cuda.empty_cache()
        there = [p.grad for p in self._parameters if p.grad is not None]
        if there:
            torch._foreach_zero_(there)
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)

    def drop_unused(self) -> None:
        """Frees the gradients that no backward pass has added to: the optimizer would decay their weights."""
        for parameter in self._parameters:
            if id(parameter) not in self._used:
                parameter.grad = None
