"""Loads rows from a file, a generator inside the package, reasoning-gym, the hub, or memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dapo_rl.base.hub import cache_only, hub_problem
from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import nearest
from dapo_rl.config import SourceSettings, labels_of, source_name
from dapo_rl.config.sources import read_sources
from dapo_rl.data import arithmetic, tasks
from dapo_rl.data.files import SUFFIXES, read_file
from dapo_rl.data.gym import PREFIX as GYM
from dapo_rl.data.gym import read_gym
from dapo_rl.data.media import MediaError
from dapo_rl.data.rows import BadRow, Row, Rows, RowStream, make_row
from dapo_rl.data.source_parameters import check_names
from dapo_rl.errors import UserError

IN_MEMORY = "in memory"
"""The name that a run's settings record for data passed as an object."""

SHORT = 1000
"""An iterator that ends within so many rows is read as a list: it can then be shuffled and repeated."""

_HELD_OUT_SPLITS = ("validation", "test", "eval")
_NAMES = (str, os.PathLike, SourceSettings)
Source = str | os.PathLike[str] | SourceSettings | Sequence[str | SourceSettings] | Iterable[Mapping[str, Any]]


def load_rows(source: Source, *, key: str = "data.train") -> Rows:
    """All rows of a source; `key` is the setting to name in messages."""
    rows = open_rows(source, key=key)
    return _partition(key, rows.source, rows.open()) if isinstance(rows, RowStream) else rows


def open_rows(source: Source, *, key: str = "data.train") -> Rows | RowStream:
    """The rows of a source or of a list of sources, or, if it does not tell how many there are, a stream of them."""
    if isinstance(source := as_sources(source, key), tuple):
        return _together([_known_length(rows) for rows in open_each(source, key)], key, source_name(source))
    return _open_one(source, key)


def as_sources(source: Any, key: str) -> Any:
    """A list that names sources, as a tuple like that of `data.train`; anything else, such as a list of rows, as it is,
    but never as a tuple."""
    if not isinstance(source, list | tuple):
        return source
    named = [isinstance(each, _NAMES) or (isinstance(each, Mapping) and "source" in each) for each in source]
    if not all(named) or not any(isinstance(each, _NAMES) for each in source):
        return list(source)
    try:
        return read_sources(source, key)
    except ValueError as error:
        raise UserError(str(error)) from None


def open_each(sources: tuple[str | SourceSettings, ...], key: str) -> list[Rows | RowStream]:
    """The rows of each entry of a list; they know where they come from."""
    opened = [_open_one(entry, key) for entry in sources]
    return [_from(label, rows) for label, rows in zip(labels_of(sources), opened, strict=True)]


def _from(origin: str, rows: Rows | RowStream) -> Rows | RowStream:
    if isinstance(rows, RowStream):
        read = rows.open
        return replace(rows, open=lambda: (replace(row, origin=origin) for row in read()))
    good, bad = [replace(row, origin=origin) for row in rows.good], [replace(row, origin=origin) for row in rows.bad]
    return Rows(rows.key, rows.source, good, bad, (origin,))


def _known_length(rows: Rows | RowStream) -> Rows:
    if isinstance(rows, Rows):
        return rows
    raise UserError(
        f"{rows.key}: {rows.source} is a stream without a length, which cannot be shuffled with the other sources of "
        f"the list; give {'the entries weights' if rows.key == 'data.train' else 'it a length, without streaming'}"
    )


def _together(parts: Sequence[Rows], key: str, name: str) -> Rows:
    good, bad = [row for part in parts for row in part.good], [row for part in parts for row in part.bad]
    return Rows(key, name, good, bad, tuple(origin for part in parts for origin in part.origins))


def _open_one(source: Source, key: str) -> Rows | RowStream:
    if isinstance(source, SourceSettings):
        name, parameters = source.source, dict(source.model_extra or {})
    elif isinstance(source, str | os.PathLike):
        name, parameters = os.fspath(source), {}
    else:
        return _open_values(source, "", key)
    rows = _by_name(name, parameters, key)
    return _open_values(_from_hub(name, parameters, key), name, key) if rows is None else _partition(key, name, rows)


def check_there(source: Source | None, key: str) -> None:
    """Raises a UserError for a file that is missing, before anything that takes long."""
    source = as_sources(source, key)
    named = source if isinstance(source, tuple) else [source] if isinstance(source, _NAMES) else []
    for each in named:
        name = each.source if isinstance(each, SourceSettings) else os.fspath(each)
        if name.lower().endswith(SUFFIXES):
            read_file(Path(name), key)


def _open_values(values: Any, name: str, key: str) -> Rows | RowStream:
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{key}: expected a source or a list of rows, got {type(values).__name__}")
    prefix = f"{name}:" if name else ""
    if _has_length(values):
        return _partition(key, name, _in_memory(values, prefix))
    if not isinstance(values, Iterator):
        return RowStream(key, name, partial(_in_memory, values, prefix), repeats=True)
    try:
        first = list(islice(values, SHORT + 1))
    except Exception as error:  # of the user's iterator
        raise UserError(f"{key}: its rows cannot be read: {type(error).__name__}: {one_line(error)}") from error
    if len(first) <= SHORT:
        return _partition(key, name, _in_memory(first, prefix))
    return RowStream(key, name, partial(_in_memory, chain(first, values), prefix), repeats=False)


def _has_length(values: Any) -> bool:
    try:
        len(values)
    except TypeError:
        return False
    return True


def _partition(key: str, name: str, rows: Iterator[Row | BadRow]) -> Rows:
    good: list[Row] = []
    bad: list[BadRow] = []
    try:
        for row in rows:
            if isinstance(row, Row):
                good.append(row)
            else:
                bad.append(row)
    except MediaError as error:
        raise UserError(f"{key}: {error}") from None
    return Rows(key, name, good, bad)


def _by_name(name: str, parameters: Mapping[str, Any], key: str) -> Iterator[Row | BadRow] | None:
    """The rows of a source that is not on the hub; None for one that is."""
    if name == IN_MEMORY:
        raise UserError(f"{key}: the run was given its data in Python; resume it there, with train(resume=True)")
    if name == arithmetic.NAME:
        return arithmetic.read_arithmetic(parameters, key)
    if name == tasks.NAME:
        return tasks.read_tasks(parameters, key)
    if name.startswith(GYM):
        return read_gym(name.removeprefix(GYM), parameters, key)
    if name.lower().endswith(SUFFIXES):
        check_names(parameters, [], key, "a file")
        return read_file(Path(name), key)
    if _looks_like_a_file(name):
        raise UserError(f"{key}: {name}: unsupported format; use one of {', '.join(SUFFIXES)}")
    if not name or nearest(name, [arithmetic.NAME, GYM], cutoff=0.8):
        # A misspelt name is not one to look for on the hub.
        raise UserError(f"{key}: no source {name!r}; did you mean arithmetic or reasoning_gym:NAME?")
    return None


def _looks_like_a_file(name: str) -> bool:
    """Whether a name is a path. A hub name may end in a version (`org/data-v1.5`): its suffix starts with a digit."""
    is_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or os.path.isfile(name)
    return is_path or bool(re.search(r"\.[A-Za-z]\w*$", name))


def _from_hub(name: str, parameters: Mapping[str, Any], key: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{key}: {name}: hub data needs datasets: pip install 'dapo-rl[datasets]'") from None
    problem = hub_problem()
    try:
        with cache_only() if problem else nullcontext():
            dataset = datasets.load_dataset(name, **{"split": "train", **parameters})
    except Exception as error:  # the network, the hub, a missing split: each raises another type
        why = f"the hub cannot be reached ({problem})" if problem else one_line(error)
        raise UserError(f"{key}: {name}: cannot be loaded from the hub: {why}") from None
    if isinstance(dataset, Mapping):
        raise UserError(f"{key}.split: {name} has {', '.join(dataset)}; name one of them")
    return dataset


def _in_memory(values: Iterable[Any], prefix: str) -> Iterator[Row | BadRow]:
    """Rows of a list of mappings, or of a data set that yields mappings."""
    for number, value in enumerate(values):
        yield make_row(number, f"{prefix}row {number}", value)


def choose_splits(train: Any, held_out: Any, evaluates: bool) -> tuple[Any, Any, str | None]:
    """The training and the held-out data set, and a note if they were chosen from a dictionary of splits, as
    `datasets.load_dataset` returns it.

    `evaluates` says that the run evaluates between steps: only then is a held-out split taken from the training
    data's dictionary.
    """
    if isinstance(held_out, Mapping):
        held_out = _only(held_out)
    if not isinstance(train, Mapping):
        return train, held_out, None
    if "train" not in train:
        raise UserError(
            f"train_dataset: a dictionary of {', '.join(map(str, train))}; give one data set, or a split named train"
        )
    name = next((name for name in _HELD_OUT_SPLITS if name in train), None) if held_out is None and evaluates else None
    chosen = "training on the split train" + (f", evaluating on {name}" if name else "")
    left = [str(other) for other in train if other not in ("train", name)]
    note = f"train_dataset: {chosen}" + (f"; not used: {', '.join(left)}" if left else "")
    return train["train"], train[name] if name else held_out, note


def _only(data_sets: Mapping[Any, Any]) -> Any:
    if len(data_sets) != 1:
        names = ", ".join(map(str, data_sets))
        raise UserError(f"eval_dataset: {names or 'an empty dictionary'}; a run evaluates on one data set: give one")
    return next(iter(data_sets.values()))
