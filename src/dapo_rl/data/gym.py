"""Rows from reasoning-gym: procedural tasks with scorers.

A row has what a scorer needs: `data_source` names the task, `gym_parameters` has the settings that created it, and
`question`, `answer`, `metadata` are the entry itself:
`create_dataset(name, **gym_parameters).score_answer(response, entry)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.data.rows import BadRow, Row, make_row
from dapo_rl.data.source_parameters import check_names, whole
from dapo_rl.errors import UserError

PREFIX = "reasoning_gym:"


def read_gym(name: str, parameters: Mapping[str, Any], key: str) -> Iterator[Row | BadRow]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(f"{key}: {PREFIX}{name} needs reasoning-gym: pip install 'dapo-rl[gym]'") from None
    if name not in DATASETS:
        close = nearest(name, DATASETS)
        raise UserError(f"{key}: reasoning_gym has no task {name!r}{did_you_mean(close and PREFIX + close)}")
    fields = dataclasses.fields(DATASETS[name][1])
    check_names(parameters, [field.name for field in fields], key, f"{PREFIX}{name}")
    size = whole(parameters, "size", 1000, key, least=1)
    seed = whole(parameters, "seed", 0, key)
    for field in fields:  # the tasks do not check this; many would count up to 1e300
        if type(field.default) is int and type(parameters.get(field.name)) is float:
            whole(parameters, field.name, field.default, key)
    own = {k: v for k, v in parameters.items() if k not in ("size", "seed")}
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **_specs(name, own))
    except Exception as error:  # a task's own checks may raise anything
        raise UserError(f"{key}: {PREFIX}{name} rejects its parameters: {one_line(error)}") from None
    return _entries(dataset, name, own, size)


def _specs(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """`composite` mixes tasks from a list of {name, weight, config}."""
    if name != "composite":
        return parameters
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in parameters.get("datasets") or []]
    return {**parameters, "datasets": specs}


def _entries(dataset: Any, name: str, parameters: dict[str, Any], size: int) -> Iterator[Row | BadRow]:
    for number in range(size):
        where = f"{PREFIX}{name}:row {number}"
        try:
            entry = dataset[number]
        except Exception as error:  # a generator may find no problem for its parameters
            yield BadRow(number, where, f"the task could not generate it: {one_line(error)}")
            continue
        task, own = _scored_by(entry, name, parameters)
        scorer = {"prompt": entry["question"], "data_source": f"{PREFIX}{task}", "gym_parameters": own}
        yield make_row(number, where, {**entry, **scorer})


def _scored_by(entry: Mapping[str, Any], name: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An entry of a mixture is scored by the task that generated it."""
    if name != "composite":
        return name, parameters
    task = entry["metadata"]["source_dataset"]
    config = next(spec.get("config", {}) for spec in parameters["datasets"] if spec["name"] == task)
    return task, {k: v for k, v in config.items() if k not in ("size", "seed")}
