"""The sources of prompts that `data.train` and `data.eval` name: one, or a list."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config.section import Section


class SourceSettings(Section):
    model_config = ConfigDict(frozen=True, extra="allow")
    source: str
    """The source, as in a plain `data.train` string; all other keys are parameters of the source."""
    weight: float | None = Field(None, gt=0)
    """Its share of the draws in a list of sources, relative to the other weights. It has no effect without a list."""

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name != "weight" or value is not None}


Sources = str | SourceSettings | tuple[str | SourceSettings, ...]
"""A source, or a list of them."""

AN_ENTRY = "an entry is a source or {source: FILE, weight: 2}"


def entries_of(sources: Sources | None) -> tuple[SourceSettings, ...]:
    """The entries of a list of sources; a single source is a list of one."""
    listed = sources if isinstance(sources, tuple) else () if sources is None else (sources,)
    return tuple(SourceSettings(source=entry) if isinstance(entry, str) else entry for entry in listed)


def source_name(sources: Sources | None) -> str:
    """The names of the sources, without their parameters, for messages."""
    return ", ".join(entry.source for entry in entries_of(sources)) or "none"


def weights_of(sources: Sources) -> tuple[float, ...] | None:
    """The weights of a list: 1 where none is given; None if no entry has one."""
    entries = entries_of(sources)
    if not isinstance(sources, tuple) or all(entry.weight is None for entry in entries):
        return None
    return tuple(1.0 if entry.weight is None else entry.weight for entry in entries)


def labels_of(sources: tuple[str | SourceSettings, ...]) -> list[str]:
    """A different name for each entry of a list. A source that is there several times, with different parameters, gets
    a number."""
    names = [entry.source for entry in entries_of(sources)]
    before = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name}#{earlier + 1}" if earlier else name for name, earlier in zip(names, before, strict=True)]


def read_sources(value: Any, key: str) -> Any:
    """The value of `data.train` or `data.eval`. Raises ValueError, with one line, for what is none."""
    if isinstance(value, list | tuple):
        return _read_list(value, key)
    return _read_entry(value, key) if isinstance(value, Mapping | os.PathLike) else value


def _read_list(values: list[Any] | tuple[Any, ...], key: str) -> Sources:
    if not values:
        raise ValueError(f"{key}: the list is empty; {AN_ENTRY}")
    entries = tuple(_read_entry(value, key) for value in values)
    read = entries_of(entries)
    for at, entry in enumerate(read):
        if any((entry.source, entry.model_extra) == (other.source, other.model_extra) for other in read[:at]):
            raise ValueError(f"{key}: {entry.source} appears twice; keep one, with a weight")
        if entry.weight is not None and key == "data.eval":
            raise ValueError(f"{key}: {entry.source} has a weight, but an evaluation uses every prompt; leave it out")
    return entries[0] if len(entries) == 1 else entries


def _read_entry(value: Any, key: str) -> str | SourceSettings:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, SourceSettings):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: cannot read {shown(value)}; {AN_ENTRY}")
    if not isinstance(value.get("source"), str):
        hint = did_you_mean(nearest("source", [str(name) for name in value]) and "source", AN_ENTRY)
        raise ValueError(f"{key}: {shown(dict(value))} names no source{hint}")
    try:
        return SourceSettings.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        weight = shown(first["input"])
        raise ValueError(f"{key}: the weight of {value['source']}, {weight}, is not a number above 0") from None
