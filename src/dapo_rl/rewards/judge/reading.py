"""The mark in a judge's reply."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_rl.base.quote import shown

LONGEST_REPLY = 1 << 20
"""Characters of a reply that are read."""


class NoMarkError(ValueError):
    """Why a reply has no mark, as one line."""


def score_of(reply: str, parse: str | Mapping[str, str], scale: Mapping[str, float] | None) -> float:
    """The score that a reply gives, or NoMarkError."""
    mark = _mark(reply[-LONGEST_REPLY:], parse)
    if scale is None:
        return _number(mark)
    if set(scale) == {"min", "max"}:
        low, high, value = scale["min"], scale["max"], _number(mark)
        if not low <= value <= high:
            raise NoMarkError(f"its mark {value:g} is not between {low:g} and {high:g}")
        return (value - low) / (high - low)
    words = {word.strip().lower(): score for word, score in scale.items()}
    said = ("true" if mark else "false") if isinstance(mark, bool) else str(mark)
    if (score := words.get(said.strip().strip("\"'.*`").lower())) is None:
        raise NoMarkError(f"its mark {shown(mark)} is not one of {', '.join(scale)}")
    return float(score)


def _mark(reply: str, parse: str | Mapping[str, str]) -> Any:
    key = parse["json"] if isinstance(parse, Mapping) else parse.removeprefix("json:").strip()
    if isinstance(parse, Mapping) or parse.startswith("json:"):
        objects = [found for found in _objects(reply) if key in found]
        if not objects:
            raise NoMarkError(f"its reply has no JSON object with {shown(key)}: {shown(reply)}")
        return objects[-1][key]
    if not (found := re.findall(parse, reply)):
        raise NoMarkError(f"nothing in its reply matches {shown(parse)}: {shown(reply)}")
    return found[-1]


def _objects(reply: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, with whatever is around them."""
    decoder, at = json.JSONDecoder(), reply.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(reply, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict):
                yield value
        at = reply.find("{", end)


def _number(mark: Any) -> float:
    try:
        value = float(mark)
    except (TypeError, ValueError, OverflowError):
        raise NoMarkError(f"its mark {shown(mark)} is not a number") from None
    if not math.isfinite(value):
        raise NoMarkError(f"its mark {shown(mark)} is not finite")
    return value
