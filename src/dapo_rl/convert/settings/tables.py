"""Reads the tables of other libraries' settings (`*.yaml` in this directory).

A table has `defaults`, the values of settings that a user leaves out, where learning or memory depends on them, and
`settings` by sections. Names of sections and settings that are handled alike are separated by blanks; a name can be a
pattern. The entry of a setting is its counterpart here, or a mapping of:

- `to`, the counterpart, with `by`, a conversion of `values.py`, or with `values`, a table or a list of equal names, and
  `otherwise`, the reason that other values have no counterpart (`learns: false`: learning does not depend on it);
- `joint`, a counterpart whose value follows from several settings; `alone` converts the setting on its own, for hints;
- `mapping`, a counterpart that is a mapping, whose keys are carried over one by one;
- `note`, a remark.

Settings without a counterpart are listed by the reason: under `unsupported` those that affect what is learned, except
at the values in brackets, and under `ignored` all others. Reasons and notes in capitals are defined in `reasons.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dapo_rl.convert.settings.setting import Conversion, Setting
from dapo_rl.convert.settings.values import CONVERSIONS, choice

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def settings_table(name: str) -> dict[str, Any]:
    return dict(yaml.load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"), _Loader))


def reason(name: str) -> str:
    """The text of a reason in `reasons.yaml`; any other text stays as it is."""
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
            note = reason(entry.get("note", ""))
            yield keys, Setting(ours, _conversion(entry), note, joint="joint" in entry, mapping="mapping" in entry)


def _conversion(entry: Mapping[str, Any]) -> Conversion | None:
    if "values" in entry:
        known = entry["values"]
        table = known if isinstance(known, dict) else {name: name for name in known}
        return choice(table, reason(entry["otherwise"]), entry.get("learns", True))
    name = entry.get("by") or entry.get("alone") or ("mapping_if_null" if "mapping" in entry else None)
    return None if name is None else CONVERSIONS[name]
