"""The settings of verl, TRL, ms-swift and AReaL, and what each is here.

One table per library. Error messages name the counterpart of a foreign setting; `dapo convert` translates whole files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.foreign.areal import AREAL, AREAL_DEFAULTS
from dapo_rl.foreign.record import Foreign, Near, NoCounterpartError
from dapo_rl.foreign.swift import SWIFT, SWIFT_DEFAULTS
from dapo_rl.foreign.trl import TRL, TRL_DEFAULTS
from dapo_rl.foreign.verl import VERL, VERL_DEFAULTS


@dataclass(frozen=True, slots=True)
class Library:
    """Another library: its settings, and its defaults that matter."""

    name: str
    settings: Mapping[str, Foreign]
    defaults: Mapping[str, Any]
    roots: tuple[str, ...] = ()
    """Sections that only this library has."""

    def find(self, key: str) -> Foreign | None:
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

_ALIASES = {
    "n": "actor_rollout_ref.rollout.n",
    "soft_overlong": "actor.overlong_reward_penalty",
    "overlong_buffer": "custom_reward_function.overlong_buffer.enable",
    "filter_groups": "algorithm.filter_groups.enable",
    "custom_reward_function": "custom_reward_function.path",
    "loss_mode": "actor_rollout_ref.actor.policy_loss.loss_mode",
}
"""Names that people write for a setting or a section of settings."""


_OF_MEGATRON = ("lr", "load", "save", "gpus")
_TOO_SHORT = ("model", "columns", "system", "template", "config", "debug", "strict", *_OF_MEGATRON)
_TOO_WIDE = ("eval_*", "save_*", "include_*")
"""Names and patterns that are more likely a misspelt setting of this project, such as `save_every`."""


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings below a key; a setting that is a mapping becomes dotted keys."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, value


def counterpart(key: str) -> str | None:
    """The setting here that a setting of another library is, if there is one."""
    entry = _entry(key)
    return None if entry is None else entry.ours


def foreign_hint(key: str, value: Any) -> str | None:
    """What an unknown setting is here, if it is one of another library: the end of an error message."""
    key, value = next(leaves(key, value))
    key = key.lstrip("+~")
    entry = _entry(key)
    if entry is None:
        owner = next((library for library in LIBRARIES.values() if key.split(".")[0] in library.roots), None)
        hint = "; it looks like a setting of {}: `dapo convert FILE` translates its files"
        return None if owner is None else hint.format(owner.name)
    if entry.ours is None:
        return f"; it has no counterpart here: {entry.note}"
    if entry.mapping:
        return f"; here it is {entry.ours}.{key.rpartition('.')[2]}={_written(value)}"
    if entry.joint and entry.convert is None:
        return f"; here it is {entry.ours}" + (f" ({entry.note})" if entry.note else "")
    try:
        converted = entry.convert(value) if entry.convert else value
    except NoCounterpartError as error:
        return f"; here it is {entry.ours}, but {shown(value)} has no counterpart: {error}"
    except Exception:  # not a value of that setting
        return f"; here it is {entry.ours}"
    effect = f" ({converted.effect})" if isinstance(converted, Near) else ""
    converted = converted.value if isinstance(converted, Near) else converted
    return f"; here it is {entry.ours}={_written(converted)}{effect}"


def _entry(key: str) -> Foreign | None:
    for library in LIBRARIES.values():
        if key not in _OF_MEGATRON and (key in library.settings or key.split(".")[0] in library.roots):
            entry = library.find(key)
            if entry is not None:
                return entry
    last = key.split(".")[-1]
    if last in _ALIASES:
        return _entry(_ALIASES[last])
    for library in (LIBRARIES["trl"], LIBRARIES["ms-swift"]):
        entry = library.find(last)
        if entry is not None and last not in _TOO_SHORT and entry not in map(library.settings.get, _TOO_WIDE):
            return entry
    # Names without an underscore (lr, path, name) say too little on their own.
    ends = (entry for library in LIBRARIES.values() for name, entry in library.settings.items()
            if "_" in last and name.endswith(f".{last}"))  # fmt: skip
    return next(ends, None)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(item) for item in value)}]"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
