"""The settings of verl, TRL, ms-swift and AReaL with their counterparts here: one table per library.

`dapo convert` translates whole files by them, and error messages name the counterpart of an unknown setting
(`dapo_rl.convert.settings.hints`). A layer of its own, below `dapo_rl.config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dapo_rl.convert.settings.areal import AREAL, AREAL_DEFAULTS
from dapo_rl.convert.settings.ms_swift import SWIFT, SWIFT_DEFAULTS
from dapo_rl.convert.settings.setting import Setting
from dapo_rl.convert.settings.trl import TRL, TRL_DEFAULTS
from dapo_rl.convert.settings.verl import VERL, VERL_DEFAULTS


@dataclass(frozen=True, slots=True)
class Library:
    """Another library: its settings, and its defaults that matter."""

    name: str
    settings: Mapping[str, Setting]
    defaults: Mapping[str, Any]
    roots: tuple[str, ...] = ()
    """Sections that only this library has."""

    def find(self, key: str) -> Setting | None:
        """The entry of a key: its own, or that of the longest pattern that matches."""
        if key in self.settings:
            return self.settings[key]
        patterns = [pattern for pattern in self.settings if "*" in pattern and fnmatchcase(key, pattern)]
        return self.settings[max(patterns, key=len)] if patterns else None


LIBRARIES: dict[str, Library] = {
    "verl": Library("verl", VERL, VERL_DEFAULTS, ("actor_rollout_ref", "algorithm", "trainer", "reward_model")),
    "trl": Library("TRL", TRL, TRL_DEFAULTS),
    "ms-swift": Library("ms-swift", SWIFT, SWIFT_DEFAULTS),
    "areal": Library("AReaL", AREAL, AREAL_DEFAULTS, ("gconfig", "actor", "train_dataset", "valid_dataset", "rollout")),
}


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings below a key; a setting that is a mapping becomes dotted keys."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, value
