"""A rank's place among the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    world_size: int
    device: torch.device
    alive: Callable[[], None] = lambda: None
    """Called while the rank makes progress."""
    on_host: int = 0
    """Its number among the ranks of its host."""
    of_host: int = 1
    """The ranks of its host."""
