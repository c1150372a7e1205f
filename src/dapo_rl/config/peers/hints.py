"""Hints for error messages about unknown settings: the counterpart of a setting of another library."""

from __future__ import annotations

from typing import Any

from dapo_rl.base.quote import cut, shown
from dapo_rl.config.peers import LIBRARIES, Setting, leaves
from dapo_rl.config.peers.values import Near, NoCounterpartError, written

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


def counterpart(key: str) -> str | None:
    """The setting here that a setting of another library is, if there is one."""
    entry = _entry(key)
    return None if entry is None else entry.ours


def library_hint(key: str, value: Any) -> str | None:
    """The end of an error message that names the counterpart of another library's setting; None if it is none."""
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
        return f"; here it is {entry.ours}.{key.rpartition('.')[2]}={cut(written(value), 80)}"
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
    return f"; here it is {entry.ours}={cut(written(converted), 80)}{effect}"


def _entry(key: str) -> Setting | None:
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
