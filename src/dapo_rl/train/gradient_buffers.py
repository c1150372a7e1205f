"""Gradients that are allocated before the forward pass.

Autograd allocates them during the backward pass, in the memory of activations that it has just freed. They split that
memory into pieces that the next micro-batch cannot use. That matters only where memory is short.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Gradients:
    """The gradients of a model's trained parameters. Those that no loss depends on become None again."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        used: set[int] = set()
        self._used = used
        """The ids of the parameters that a backward pass has added to."""
        handles = [p.register_post_accumulate_grad_hook(lambda p: used.add(id(p))) for p in self._parameters]
        weakref.finalize(self, _remove, handles)

    def allocate(self) -> None:
        """Sets all gradients to zero."""
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


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
