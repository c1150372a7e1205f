"""How a module is changed: it becomes an instance of a subclass of its own class, whose `forward` is ours.

Parameters, children, attributes and hooks stay as they are, and other modules of the class are not affected. torch's
parametrizations and FSDP change modules in the same way. A `forward` set on the instance would refer back to its
module, and the memory of a discarded model would wait for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


class FusedModule(nn.Module):
    """Base of the classes that fused modules are given. In theirs, `super().forward` is the original."""

    fused: Any
    """What `forward` needs besides the module itself."""


@dataclass(frozen=True, slots=True)
class Change:
    module: nn.Module
    into: type[FusedModule]
    fused: Any = None

    def possible(self) -> bool:
        """A `forward` that was set on the instance would hide the one of its class."""
        return "forward" not in vars(self.module)


def make_changes(changes: Iterable[Change]) -> None:
    classes: dict[tuple[type[FusedModule], type[nn.Module]], type[nn.Module]] = {}
    for change in changes:
        into, original = change.into, type(change.module)
        if (into, original) not in classes:
            classes[into, original] = type(f"Fused{original.__name__}", (into, original), {})
        change.module.__class__ = classes[into, original]
        change.module.fused = change.fused
