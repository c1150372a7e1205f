"""A setting of another library: its counterpart here, or the reason that there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NoCounterpartError(ValueError):
    """A value that no setting here expresses. The message says why; `learns` tells whether it changes learning."""

    def __init__(self, reason: str, learns: bool = True) -> None:
        super().__init__(reason)
        self.learns = learns


@dataclass(frozen=True, slots=True)
class Near:
    """The nearest value here, and what the difference does."""

    value: Any
    effect: str
    learns: bool = True


Conversion = Callable[[Any], Any]
"""From a value there to a value here or a `Near`; raises NoCounterpartError."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of another library."""

    ours: str | None = None
    """The setting here; None: it has no counterpart."""
    convert: Conversion | None = None
    note: str = ""
    """The reason that there is no counterpart, or a remark on the one that there is."""
    joint: bool = False
    """The value here follows from several settings there; `dapo_rl.convert` computes it."""
    learns: bool = False
    """Without a counterpart: whether learning depends on it."""
    mapping: bool = False
    """`ours` is a mapping, and the last part of a key there is a key of it."""
    off: tuple[Any, ...] = ()
    """Values at which a setting without a counterpart does nothing."""

    def is_off(self, value: Any) -> bool:
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)
