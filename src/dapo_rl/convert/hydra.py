"""Hydra's overrides and OmegaConf's interpolation, as text: nothing is resolved by code of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dapo_rl.config.recipe import parse_yaml

_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORD = re.compile(r"[^\s:#&]*")
_ENTRY = re.compile(r"""("[^"]*"|'[^']*')|(?<=[{,])(\s*[\w.@/-]+):(?=[^\s,}])""")
"""A quoted text, or an entry of Hydra's `{a:1,b:2}`, for which YAML wants a space."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MOST_RESOLVED = 20
_MOST_REFERRED_TO = 100
"""Settings of a section that is referred to. Larger ones stay as they are: a file of references could be endless."""


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A value that the file does not tell, and why."""

    text: str
    why: str


def typed(text: str) -> Any:
    """The value that a text of a command line stands for: a number, a list, true, null or the text."""
    if _FLOAT.fullmatch(text):
        return _number(text)
    if "${" in text:  # left for `interpolated`
        return text
    try:
        value = numbers(parse_yaml(_ENTRY.sub(lambda match: match[1] or f"{match[2]}: ", text)))
    except yaml.YAMLError:
        return text
    # Comments, folded lines, dates and mappings without braces are YAML's alone: here they are text.
    is_quoted = text.lstrip().startswith(("[", "{", "'", '"'))
    return value if is_quoted or (_WORD.fullmatch(text) and isinstance(value, int | float | None)) else text


def numbers(value: Any) -> Any:
    """YAML reads 1e-6 as text; here it is a number. `None` written as in Python is null."""
    if isinstance(value, str):
        return _number(value) if _FLOAT.fullmatch(value) else None if value == "None" else value
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if isinstance(value, dict):
        return {str(key): numbers(item) for key, item in value.items()}
    return value


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def interpolated(keys: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Replaces `${other.key}`, `${.sibling}`, `${oc.select:key,default}` and `${oc.env:NAME,default}`. A reference to a
    section becomes its settings."""
    resolved: dict[str, Any] = {}
    for key, value in keys.items():
        found = _resolved(key, value, keys, environment, 0)
        if isinstance(found, dict) and 0 < len(found) <= _MOST_REFERRED_TO:
            for name, inner in found.items():
                below = f"{key}.{name}"
                if below not in keys:
                    resolved[below] = _resolved(below, inner, keys, environment, 0)
        else:
            resolved[key] = found
    return resolved


def _resolved(key: str, value: Any, keys: Mapping[str, Any], environment: Mapping[str, str], depth: int) -> Any:
    if isinstance(value, list):
        return [_resolved(key, item, keys, environment, depth) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _MOST_RESOLVED:
        return UnknownValue(value, "it refers to itself")
    match = _REFERENCE.search(value)
    if match is None:
        return UnknownValue(value, "it is not evaluated")
    found, is_part = _reference(key, match[1], keys, environment), match[0] != value
    if is_part:
        found = _resolved(key, found, keys, environment, depth + 1)
    if isinstance(found, UnknownValue):
        return UnknownValue(value, found.why)
    if is_part:
        found = f"{value[: match.start()]}{found}{value[match.end() :]}"
        if len(found) > 1 << 16:
            return UnknownValue(value[:100], "it is too long")
    return _resolved(key, found, keys, environment, depth + 1)


def _reference(key: str, inside: str, keys: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    resolver, colon, rest = inside.partition(":")
    if not colon:
        name = _absolute(key, inside.strip())
        below = {other[len(name) + 1 :]: value for other, value in keys.items() if other.startswith(f"{name}.")}
        return keys[name] if name in keys else below or UnknownValue(inside, f"{name} is not in the file")
    name, comma, default = (part.strip() for part in rest.partition(","))
    otherwise = typed(default.strip("\"'")) if comma else UnknownValue(inside, f"{name} is not in the file")
    if resolver.strip() == "oc.select":
        return keys.get(_absolute(key, name), otherwise)
    if resolver.strip() == "oc.env":
        return environment.get(name, otherwise)
    return UnknownValue(inside, f"the resolver {resolver.strip()[:30]} is not evaluated")


def _absolute(key: str, name: str) -> str:
    """A name that starts with dots is relative to its key: `.a` is a sibling, `..a` one level above."""
    dots = len(name) - len(name.lstrip("."))
    parents = key.split(".")[:-dots] if dots else []
    return ".".join([*parents, name.lstrip(".")])
