"""The settings of verl, TRL, ms-swift and AReaL with their counterparts here: one table per library.

`dapo convert` translates whole files by them, and error messages name the counterpart of an unknown setting
(`dapo_rl.convert.settings.hints`). A layer of its own, below `dapo_rl.config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from dapo_rl.convert.settings.setting import Setting
from dapo_rl.convert.settings.tables import settings_table, table_settings


@dataclass
class Library:
    """Another library: its settings, and its defaults that matter. Both are read from its tables when first needed."""

    name: str
    tables: tuple[str, ...]
    """The last one has the defaults and the missing features."""
    roots: tuple[str, ...] = ()
    """Sections that only this library has."""

    @cached_property
    def settings(self) -> dict[str, Setting]:
        return {key: setting for table in self.tables for key, setting in table_settings(table).items()}

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        return dict(settings_table(self.tables[-1])["defaults"])

    @cached_property
    def missing(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Settings that ask for a feature that is missing here: a pattern, the feature, and the values that ask."""
        features = settings_table(self.tables[-1])["missing"].items()
        return [(key, name, how) for name, signs in features for keys, how in signs.items() for key in keys.split()]

    def find(self, key: str) -> Setting | None:
        """The entry of a key: its own, or that of the longest pattern that matches."""
        if key in self.settings:
            return self.settings[key]
        patterns = [pattern for pattern in self.settings if "*" in pattern and fnmatchcase(key, pattern)]
        return self.settings[max(patterns, key=len)] if patterns else None


LIBRARIES: dict[str, Library] = {
    "verl": Library("verl", ("verl",), ("actor_rollout_ref", "algorithm", "trainer", "reward_model")),
    "trl": Library("TRL", ("transformers", "grpo", "trl")),
    "ms-swift": Library("ms-swift", ("transformers", "grpo", "ms_swift")),
    "areal": Library("AReaL", ("areal",), ("gconfig", "actor", "train_dataset", "valid_dataset", "rollout")),
}


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings below a key; a setting that is a mapping becomes dotted keys."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, value
