"""Loads rows from a file, a generator inside the package, reasoning-gym, the hub, or memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dapo_rl.base.hub import cache_only, hub_problem
from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import nearest
from dapo_rl.config import SourceSettings
from dapo_rl.data import arithmetic
from dapo_rl.data.files import SUFFIXES, read_file
from dapo_rl.data.gym import PREFIX as GYM
from dapo_rl.data.gym import read_gym
from dapo_rl.data.parameters import check_names
from dapo_rl.data.rows import BadRow, Row, Rows, make_row
from dapo_rl.errors import UserError

IN_MEMORY = "in memory"
"""The name that a run's settings record for data passed as an object."""

Source = str | os.PathLike[str] | SourceSettings | Iterable[Mapping[str, Any]]


def load_rows(source: Source, *, key: str = "data.train") -> Rows:
    """All rows of a source; `key` is the setting to name in messages."""
    if isinstance(source, SourceSettings):
        name, parameters = source.source, dict(source.model_extra or {})
    elif isinstance(source, str | os.PathLike):
        name, parameters = os.fspath(source), {}
    else:
        return _partition(key, "", _in_memory(source, "", key))
    return _partition(key, name, _by_name(name, parameters, key))


def _partition(key: str, name: str, rows: Iterator[Row | BadRow]) -> Rows:
    good: list[Row] = []
    bad: list[BadRow] = []
    for row in rows:
        if isinstance(row, Row):
            good.append(row)
        else:
            bad.append(row)
    return Rows(key, name, good, bad)


def _by_name(name: str, parameters: Mapping[str, Any], key: str) -> Iterator[Row | BadRow]:
    if name == IN_MEMORY:
        raise UserError(f"{key}: the run was given its data in Python; resume it there, with train(resume=True)")
    if name == arithmetic.NAME:
        return arithmetic.read_arithmetic(parameters, key)
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
    return _in_memory(_from_hub(name, parameters, key), f"{name}:", key)


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


def _in_memory(values: Iterable[Any], prefix: str, key: str) -> Iterator[Row | BadRow]:
    """Rows of a list of mappings, or of a data set that yields mappings."""
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{key}: expected a source or a list of rows, got a {type(values).__name__}")
    for number, value in enumerate(values):
        yield make_row(number, f"{prefix}row {number}", value)
