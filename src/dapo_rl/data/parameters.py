"""The parameters of a source, checked: a wrong name or type is answered in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from dapo_rl.errors import UserError


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def check_names(parameters: Mapping[str, Any], known: Iterable[str], key: str, source: str) -> None:
    known = list(known)
    for name in parameters:
        if name not in known:
            hint = nearest(name, known) or (f"; it has {', '.join(known)}" if known else "; it has none")
            raise UserError(f"{key}.{name}: {source} has no such parameter{hint}")


def whole(parameters: Mapping[str, Any], name: str, default: int, key: str, least: int | None = None) -> int:
    value = parameters.get(name, default)
    if type(value) is not int or (least is not None and value < least):
        bound = "" if least is None else f" from {least} on"
        raise UserError(f"{key}.{name}: expected a whole number{bound}, got {value!r}")
    return value
