"""The settings of verl, TRL, ms-swift and AReaL with their counterparts here: one table per library.

`dapo convert` translates whole files by them, and error messages name the counterpart of an unknown setting
(`dapo_rl.config.peers.hints`).

A table (`*.yaml` in this directory) has `defaults`, the values of settings that a user leaves out, where learning or
memory depends on them, `missing`, the features that are missing here with the settings that ask for them, and
`settings` by sections. Names of sections and settings that are handled alike are separated by blanks; a name can be a
pattern. The entry of a setting is its counterpart here, or a mapping of:

- `to`, the counterpart, with `by`, a conversion of `values.py`, or with `values`, a table or a list of equal names, and
  `otherwise`, the reason that other values have no counterpart (`learns: false`: learning does not depend on it);
- `joint`, a counterpart whose value follows from several settings; `alone` converts the setting on its own, for hints,
  and `loss` is the loss that it is an option of;
- `mapping`, a counterpart that is a mapping, whose keys are carried over one by one;
- `note`, a remark.

Settings without a counterpart are grouped by reason. Those under `unsupported` affect learning, unless they have one of
the values in brackets; those under `ignored` do not. Reasons and notes in capitals are defined in `reasons.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from dapo_rl.config.peers.values import CONVERSIONS, Conversion, choice

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Setting:
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
    loss: str = ""
    """The loss that it is an option of, if it is one."""
    off: tuple[Any, ...] = ()
    """Values at which a setting without a counterpart does nothing."""

    def is_off(self, value: Any) -> bool:
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)


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


@cache
def settings_table(name: str) -> dict[str, Any]:
    return dict(yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), _Loader))


def reason(name: str) -> str:
    """The text of a reason in `reasons.yaml`; returns any other text unchanged."""
    return str(settings_table("reasons").get(name, name))


def table_settings(name: str) -> dict[str, Setting]:
    """The settings of a table by their dotted keys."""
    return {
        f"{section}.{key}".lstrip("."): setting
        for sections, entries in settings_table(name)["settings"].items()
        for section in sections.split() or [""]
        for keys, setting in _entries(entries)
        for key in keys.split()
    }


def _entries(section: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    for keys, entry in section.items():
        if keys in ("unsupported", "ignored"):
            for why, listed in entry.items():
                for names, off in (listed if isinstance(listed, dict) else {listed: []}).items():
                    learns = keys == "unsupported"
                    yield names, Setting(note=reason(why), learns=learns, off=(None, *off) if learns else tuple(off))
        elif isinstance(entry, str):
            yield keys, Setting(entry)
        else:
            ours = entry.get("to") or entry.get("joint") or entry["mapping"]
            note, loss = reason(entry.get("note", "")), entry.get("loss", "")
            joint, mapping = "joint" in entry, "mapping" in entry
            yield keys, Setting(ours, _conversion(entry), note, joint=joint, mapping=mapping, loss=loss)


def _conversion(entry: Mapping[str, Any]) -> Conversion | None:
    if "values" in entry:
        known = entry["values"]
        table = known if isinstance(known, dict) else {name: name for name in known}
        return choice(table, reason(entry["otherwise"]), entry.get("learns", True))
    name = entry.get("by") or entry.get("alone") or ("mapping_if_null" if "mapping" in entry else None)
    return None if name is None else CONVERSIONS[name]
