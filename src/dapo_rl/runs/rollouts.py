"""The rollouts of a step as a Parquet table: one row per sample or episode, for kept and dropped groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo_rl.base.files import beside
from dapo_rl.base.unicode import as_unicode
from dapo_rl.codec import TURN, list_column, messages_json, token_column, turn_row
from dapo_rl.outcomes import Outcome, Waiting
from dapo_rl.types import COLUMNS, MOST_LOGGED, FloatArray, Group, Trajectory, Verdict


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group and its outcome."""

    group: Group
    outcome: Outcome | Waiting


_OWN = pa.schema(
    [
        ("step", pa.int64()),
        ("draw", pa.int64()),
        ("sample", pa.int32()),
        ("prompt_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("logps", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("version_first", pa.int64()),
        ("version_last", pa.int64()),
        ("answer", pa.string()),
        ("truth", pa.string()),
        ("score", pa.float64()),
        ("correct", pa.bool_()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("length_penalty", pa.float64()),
        ("advantage", pa.float64()),
        ("fate", pa.string()),
        ("train_logps", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
        ("clipped", pa.list_(pa.int8())),
        ("values", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        # Of episodes of several turns; null for others.
        ("messages", pa.string()),
        ("turns", pa.list_(TURN)),
        ("policy_turns", pa.int32()),
        ("tools", pa.list_(pa.string())),
        ("tool_calls", pa.int32()),
        ("tool_errors", pa.int32()),
        ("env_wait_s", pa.float64()),
        ("env_reward", pa.float64()),
        ("forks", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
    ]
)
TOKEN_COLUMNS = tuple(field.name for field in _OWN if field.name in COLUMNS)
"""Columns of trajectories. Those that the package does not know are logged too."""
OF_A_FORK = (
    *("response", *TOKEN_COLUMNS, "version_first", "version_last", "advantage"),
    *("prompt_ids", "messages", "turns"),
)
FORKED = pa.field("forked", pa.list_(pa.struct([_OWN.field(name) for name in OF_A_FORK])))
SCHEMA = _OWN.append(FORKED)
"""A row has the last trajectory of its episode, and in `forked` those before it, in their order, with the same names.

`prompt_ids` is the prompt of the trajectory, and `messages` is JSON, the conversation after it. `tools` are the names
of the tools that were called; like the counts, they are those of the whole episode."""


LONGEST_NAME = 100
"""Characters of the name of a tool."""
ROW_GROUP_TOKENS = 2**22
"""Tokens per row group, so that a step of long samples is not held in memory twice."""


def write_table(path: Path, step: int, rows: Sequence[GroupRow]) -> None:
    schema = _schema(rows)
    with beside(path) as draft, pq.ParquetWriter(draft, schema, compression="zstd") as writer:
        for part in _parts(rows):
            records = [record for row in part for record in _records(step, row)]
            writer.write_table(pa.table([_column(records, field) for field in schema], schema=schema))


def _schema(rows: Sequence[GroupRow]) -> pa.Schema:
    """The columns of a step: `SCHEMA`, `reward/NAME` for each reward function, `extra/NAME` for what they log, and the
    token columns that the package does not know."""
    verdicts = [verdict for row in rows for verdict in row.group.verdicts]
    rewards = sorted({part.name for verdict in verdicts for part in verdict.parts})[:MOST_LOGGED]
    logged: dict[str, set[type]] = {}
    for verdict in verdicts:
        for name, value in verdict.extra.items():
            logged.setdefault(name, set()).add(type(value))
    fields = [pa.field(f"reward/{name}", pa.float64()) for name in rewards]
    fields += [pa.field(f"extra/{name}", _type_of(logged[name])) for name in sorted(logged)[:MOST_LOGGED]]
    columns = [item for row in rows for each in row.group.trajectories for item in each.columns.items()]
    added = {name: array for name, array in columns if name not in COLUMNS}
    of_tokens = [pa.field(name, token_column(name, [array]).type) for name, array in sorted(added.items())]
    forked = FORKED.with_type(pa.list_(pa.struct([*FORKED.type.value_type, *of_tokens])))
    return pa.schema([*_OWN, forked, *fields, *of_tokens])


def _type_of(kinds: set[type]) -> pa.DataType:
    kinds = kinds - {type(None)}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def _parts(rows: Sequence[GroupRow]) -> Iterator[list[GroupRow]]:
    part: list[GroupRow] = []
    tokens = 0
    for row in rows:
        part.append(row)
        tokens += sum(len(each.token_ids) for each in row.group.trajectories)
        if tokens >= ROW_GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    yield part


def _column(records: Sequence[Mapping[str, Any]], field: pa.Field) -> pa.Array:
    values = [record.get(field.name) for record in records]
    if all(value is None for value in values):
        return pa.nulls(len(values), field.type)
    if field.name == FORKED.name:
        forks, fields = [fork for forked in values for fork in forked or ()], list(field.type.value_type)
        arrays = [_column(forks, each) for each in fields]
        return list_column(values, pa.StructArray.from_arrays(arrays, fields=fields))
    if field.name.startswith("extra/") and pa.types.is_string(field.type):
        values = [None if value is None else as_unicode(str(value)) for value in values]
    if not pa.types.is_list(field.type) or (field.name in SCHEMA.names and field.name not in TOKEN_COLUMNS):
        return pa.array(values, field.type)
    return token_column(field.name, values)


def _records(step: int, row: GroupRow) -> Iterator[dict[str, Any]]:
    group = row.group
    verdicts = group.verdicts or [None] * len(group.samples)  # a run may fail before a group is judged
    for i, (sample, verdict) in enumerate(zip(group.samples, verdicts, strict=True)):
        forks = [fork for fork in group.forks if fork.index == i]
        yield {
            "step": step,
            "draw": group.draw,
            "sample": i,
            "prompt_id": as_unicode(group.prompt.id),
            "data_source": as_unicode(group.prompt.data_source),
            "prompt": as_unicode(group.prompt.text),
            "finish_reason": sample.finish_reason,
            "truth": as_unicode(group.prompt.answer),
            **_judged(verdict),
            "reward": sample.scalars.get("reward"),
            "length_penalty": sample.scalars.get("length_penalty"),
            "fate": row.outcome,
            **_tokens(sample),
            **(_episode(group, sample, forks) if sample.turns or sample.messages or forks else {}),
        }


def _tokens(sample: Trajectory) -> dict[str, Any]:
    advantages = sample.get("advantages")
    return {
        "response": as_unicode(sample.text),
        "version_first": sample.versions[0] if len(sample.versions) else None,
        "version_last": sample.versions[-1] if len(sample.versions) else None,
        "advantage": None if advantages is None else _mean(advantages, sample),
        **{name: array for name, array in sample.columns.items() if name in TOKEN_COLUMNS or name not in COLUMNS},
        **_credit(sample),
    }


def _mean(advantages: FloatArray, sample: Trajectory) -> float | None:
    """Over the tokens of the policy. In double precision the mean of equal values is exact."""
    return float(advantages[sample.mask].mean(dtype=np.float64)) if sample.written else None


def _judged(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {}
    return {
        "answer": as_unicode(verdict.answer),
        "score": verdict.score,
        "correct": verdict.correct,
        "status": verdict.status,
        **{f"reward/{part.name}": part.score for part in verdict.parts},
        **{f"extra/{name}": value for name, value in verdict.extra.items()},
    }


def _credit(sample: Trajectory) -> dict[str, FloatArray | None]:
    """What a critic gave to each token; NaN for tokens that the policy did not write. Null without a critic: then all
    tokens have the sample's `advantage`."""
    if "values" not in sample.columns:
        return {"values": None, "advantages": None}
    of_tokens = {name: sample[name] for name in ("values", "advantages")}
    return {name: np.where(sample.mask, array, np.float32(np.nan)) for name, array in of_tokens.items()}


def _episode(group: Group, sample: Trajectory, forks: Sequence[Trajectory]) -> dict[str, Any]:
    scalars, whole = sample.scalars, (*forks, sample)
    turns = sum(turn.author == "policy" for each in whole for turn in each.turns)
    return {
        **_conversation(group, sample),
        "forked": [_tokens(fork) | _conversation(group, fork) for fork in forks],
        "policy_turns": _whole(scalars.get("turns", turns)),
        "tools": _tools(whole),
        **{name: _whole(scalars.get(name)) for name in ("tool_calls", "tool_errors", "forks")},
        **{name: scalars.get(name) for name in ("env_wait_s", "env_reward")},
    }


def _conversation(group: Group, sample: Trajectory) -> dict[str, Any]:
    return {
        "prompt_ids": sample.prompt_ids if len(sample.prompt_ids) else group.prompt.token_ids,
        "messages": as_unicode(messages_json(sample.messages)),
        "turns": [turn_row(turn) for turn in sample.turns],
    }


def _tools(whole: Sequence[Trajectory]) -> list[str]:
    """The names that the policy called, which need not be those of tools."""
    messages = [message for each in whole for message in each.messages]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = dict.fromkeys(str(call.get("function", {}).get("name", ""))[:LONGEST_NAME] for call in calls)
    return [as_unicode(name) or "" for name in names][:MOST_LOGGED]


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None
