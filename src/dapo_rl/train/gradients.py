"""Gradients that are allocated before the forward pass.

Autograd allocates them during the backward pass, in the memory of activations that it has just freed. They split that
memory into pieces that the next micro-batch cannot use. That matters only where memory is short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Gradients:
    """The gradients of a model's trained parameters. Those that no loss depends on stay None."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._used: set[Tensor] = set()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._used.add)

    def allocate(self) -> None:
        """Sets all gradients to zero."""
        self._used.clear()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def drop_unused(self) -> None:
        """Frees the gradients that no backward pass has added to: the optimizer would decay their weights."""
        for parameter in self._parameters:
            if parameter not in self._used:
                parameter.grad = None
