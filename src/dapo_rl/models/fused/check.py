"""Compares a replacement with the module that it replaces: results and gradients, on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROUNDING = 0.02
"""Relative difference between two computations in bfloat16; another activation or factor changes far more."""

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Compares replacements with what they replace."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """From a generator of its own, so that the global one is not advanced."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return x.to(self.device, dtype).requires_grad_()

    def agree(self, ours: Forward, theirs: Forward, inputs: Sequence[Tensor], tolerance: float) -> bool:
        """Whether the results and the gradients of the inputs are the same."""
        try:
            results, expected = self._computed(ours, inputs), self._computed(theirs, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a module may need other arguments, or return something else than tensors
            return False
        return len(results) == len(expected) and all(
            a.shape == b.shape and (a - b).norm() <= tolerance * b.norm()
            for a, b in zip(results, expected, strict=True)
        )

    def _computed(self, forward: Forward, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = forward(*inputs)
        results = [results] if isinstance(results, Tensor) else list(results)
        factors = [self.random(*x.shape, seed=100 + i).detach().to(x.dtype) for i, x in enumerate(results)]
        return [x.detach().float() for x in (*results, *torch.autograd.grad(results, inputs, factors))]


def has_its_own_forward(module: nn.Module) -> bool:
    """Whether no library has set the module's `forward`. Hooks around it run whatever it is."""
    return "forward" not in vars(module)


def is_untouched(module: nn.Module) -> bool:
    """Whether nobody has hooked into the module either, so that its work can be done without calling it."""
    return has_its_own_forward(module) and not (module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """A library that hooks into a module may have set its `forward`, which it gets back."""
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
