"""Changes a module for inference: it becomes an instance of a subclass of its own class, with another `forward`.

Parameters, children, attributes and hooks stay as they are, and other modules of the class are not affected. torch's
parametrizations and FSDP change modules in the same way. A `forward` set on the instance would refer back to its
module, and the memory of a discarded model would wait for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class FusedModule(nn.Module):
    """Base of the classes that fused modules are given. In theirs, `super().forward` is the original."""

    fused: Any
    """What `forward` needs besides the module itself."""


@dataclass(frozen=True, slots=True)
class Change:
    module: nn.Module
    into: type[FusedModule]
    fused: Any = None


def make_changes(changes: Iterable[Change]) -> None:
    classes: dict[tuple[type[FusedModule], type[nn.Module]], type[nn.Module]] = {}
    for change in changes:
        into, original = change.into, type(change.module)
        if (into, original) not in classes:
            classes[into, original] = type(f"Fused{original.__name__}", (into, original), {})
        change.module.__class__ = classes[into, original]
        change.module.fused = change.fused


class Handed:
    """A result that one module computes for another: for one input, to be used once."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._result: Tensor | None = None

    def leave(self, x: Tensor, result: Tensor) -> None:
        self._input, self._result = x, result

    def take(self, x: Tensor) -> Tensor | None:
        if self._input is not x:
            return None
        result, self._input, self._result = self._result, None, None
        return result


def agree(a: Tensor, b: Any) -> bool:
    """Whether two tensors are equal up to a few rounding errors at the scale of the tensor's RMS value."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    step = 4 * max(torch.finfo(b.dtype).eps, 1e-5)
    scale = b.double().pow(2).mean().sqrt().item()
    return torch.allclose(a.double(), b.double(), rtol=step, atol=step * scale)
