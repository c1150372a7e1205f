"""Checks the parameters of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.errors import UserError


def check_names(parameters: Mapping[str, Any], known: Iterable[str], key: str, source: str) -> None:
    known = list(known)
    for name in parameters:
        if name not in known:
            weight = ["weight"] if key == "data.train" else []  # of any source
            hint = did_you_mean(nearest(name, [*known, *weight]), f"it has {', '.join(known) or 'none'}")
            raise UserError(f"{key}.{name}: {source} has no such parameter{hint}")


def whole(parameters: Mapping[str, Any], name: str, default: int, key: str, least: int | None = None) -> int:
    value = parameters.get(name, default)
    if type(value) is not int or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise UserError(f"{key}.{name}: expected a whole number{bound}, got {value!r}")
    return value
