"""Old spellings of settings. They are accepted with a notice wherever settings are read: recipes, the command line,
config.yaml of earlier runs, and `config=` in Python."""

from __future__ import annotations

from functools import cache
from typing import Any

from dapo_rl.base.streams import complain
from dapo_rl.errors import UserError

ALIASES = {
    "sampling.retire": "sampling.skip_solved_epochs",
    "log.to": "log.trackers",
    "checkpoint.last": "checkpoint.save_final",
    "train.memory=turns": "train.memory=time_share",
}
"""Old and new names. An entry with an equals sign renames a value."""


def current_name(key: str) -> str:
    return ALIASES.get(key, key)


def current_setting(key: str, value: Any) -> tuple[str, Any]:
    """A setting by its current name, and its value by the current name of that. Prints a notice if either is old."""
    for old in (key, f"{key}={value}") if isinstance(value, str) else (key,):
        if old in ALIASES:
            _notice(old, ALIASES[old])
            name, _, renamed = ALIASES[old].partition("=")
            return name, renamed or value
    return key, value


def use_current_names(settings: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Renames old spellings in settings by section, in place."""
    for section, values in settings.items():
        for name, value in list(values.items()) if isinstance(values, dict) else ():
            key, now = current_setting(f"{section}.{name}", value)
            current = key.removeprefix(f"{section}.")
            if current != name:
                if current in values:
                    raise UserError(f"{where}{section}.{name}: is called {key} now, which is set too; keep one")
                del values[name]
            values[current] = now
    return settings


@cache  # once per process
def _notice(old: str, new: str) -> None:
    complain(f"{old} is called {new} now; the old name still works")
