"""Trajectories and verdicts outside memory: the one form that pipes, Ray, checkpoints and the rollout log share.

Trajectories become an Arrow record batch with a row each. A token column is a list of numbers, or of nested lists of
fixed size if it has a trailing shape. A new column needs no change here.

A verdict is a row of plain values. Replies of workers carry it as JSON rather than Arrow, because user code can reach
the worker's end of the pipe, and compressed Arrow buffers can expand without a bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
import pyarrow as pa

from dapo_rl.types import COLUMNS, Array, RewardPart, Trajectory, Turn, Verdict

TOKENS, SCALARS = "tokens/", "scalars/"
"""Prefixes of the names of token columns and of scalars."""
TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("author", pa.string()),
        ("seconds", pa.float64()),
        ("reward", pa.float64()),
    ]
)


def to_arrow(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    turns = [[turn_row(turn) for turn in each.turns] for each in trajectories]
    arrays: dict[str, pa.Array] = {
        "index": pa.array([each.index for each in trajectories], pa.int32()),
        "text": pa.array([_encoded(each.text) for each in trajectories], pa.binary()),
        "finish_reason": pa.array([each.finish_reason for each in trajectories], pa.string()),
        "turns": pa.array(turns, pa.list_(TURN)),
        "prompt_ids": token_column("prompt_ids", [each.prompt_ids for each in trajectories]),
    }
    offsets = _offsets([each.token_ids for each in trajectories])
    for name in dict.fromkeys(name for each in trajectories for name in each.columns):
        arrays[TOKENS + name] = token_column(name, [each.get(name) for each in trajectories], offsets)
    for name in dict.fromkeys(name for each in trajectories for name in each.scalars):
        arrays[SCALARS + name] = pa.array([each.scalars.get(name) for each in trajectories], pa.float64())
    messages = [_encoded(messages_json(each.messages)) for each in trajectories]
    arrays["messages"] = pa.array(messages, pa.binary())
    if any(each.episode for each in trajectories):
        arrays["episode"] = pa.array([_encoded(messages_json(each.episode)) for each in trajectories], pa.binary())
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def from_arrow(batch: pa.RecordBatch | pa.Table) -> list[Trajectory]:
    """Copies the trajectories out of a batch. Raises ValueError if it does not hold trajectories."""
    names = batch.schema.names
    if missing := {"index", "text", "finish_reason", "turns", "prompt_ids"} - {*names}:
        raise ValueError(f"it has no column {min(missing)}")
    tokens = {n.removeprefix(TOKENS): token_arrays(n, batch.column(n)) for n in names if n.startswith(TOKENS)}
    scalars = {n.removeprefix(SCALARS): batch.column(n).to_pylist() for n in names if n.startswith(SCALARS)}
    columns = (batch.column(name).to_pylist() for name in ("index", "text", "finish_reason", "turns"))
    prompts = token_arrays("prompt_ids", batch.column("prompt_ids"))
    messages, episodes = (
        batch.column(name).to_pylist() if name in names else [None] * batch.num_rows for name in ("messages", "episode")
    )
    trajectories = []
    for i, (index, text, reason, turns, prompt) in enumerate(zip(*columns, prompts, strict=True)):
        of_tokens = {name: arrays[i] for name, arrays in tokens.items() if arrays[i] is not None}
        if index is None or text is None or turns is None or "token_ids" not in of_tokens:
            raise ValueError("it has a trajectory without index, text, turns or tokens")
        trajectories.append(
            Trajectory(
                **{"logps": None, "versions": None, "mask": None, **of_tokens},
                text=text.decode("utf-8", "surrogatepass"),
                finish_reason=reason,
                index=index,
                turns=tuple(Turn(**turn) for turn in turns),
                prompt_ids=() if prompt is None else prompt,
                scalars={name: values[i] for name, values in scalars.items() if values[i] is not None},
                messages=_messages_of(messages[i]),
                episode=_episode_of(episodes[i]),
            )
        )
    return trajectories


def to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """An Arrow stream, for a receiver that trusts the sender."""
    batch, sink = to_arrow(trajectories), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> list[Trajectory]:
    with pa.ipc.open_stream(data) as stream:
        return from_arrow(stream.read_next_batch())


class Shipment(list[Trajectory]):
    """Trajectories that are pickled as one record batch, for Ray. A plain list arrives."""

    def __reduce__(self) -> Any:
        return from_arrow, (to_arrow(self),)


def token_column(name: str, arrays: Sequence[Array | None], offsets: pa.Array | None = None) -> pa.Array:
    """A column with a list per trajectory; null for one that does not have it. `offsets` are known if all have it."""
    present = [array for array in arrays if array is not None]
    first = present[0] if present else np.empty(0, COLUMNS.get(name, np.float32))
    if any(array.dtype != first.dtype or array.shape[1:] != first.shape[1:] for array in present):
        raise ValueError(f"{name}: trajectories disagree on its type or shape")
    # Concatenating arrays creates no Python object per token.
    values = pa.array((np.concatenate(present) if present else first).reshape(-1))
    for size in reversed(first.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return list_column(arrays, values, offsets if len(present) == len(arrays) else None)


def list_column(rows: Sequence[Sized | None], values: pa.Array, offsets: pa.Array | None = None) -> pa.Array:
    """A column with a list per row, of the values of all rows in their order; null for a row that is None."""
    offsets = _offsets([() if row is None else row for row in rows]) if offsets is None else offsets
    absent = [row is None for row in rows]
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(absent) if any(absent) else None)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _offsets(rows: Sequence[Sized]) -> pa.Array:
    return pa.array(np.cumsum([0, *map(len, rows)], dtype=np.int32))


def token_arrays(name: str, column: pa.Array | pa.ChunkedArray) -> list[Array | None]:
    """The arrays that `token_column` made a column of."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_list(column.type):
        raise ValueError(f"{name} is not a column of lists")
    values, shape = column.values, []
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    if not (pa.types.is_primitive(values.type) and values.null_count == 0):
        raise ValueError(f"{name} is not a column of numbers")
    flat = values.to_numpy(zero_copy_only=False).reshape(-1, *shape)
    ends, absent = column.offsets.tolist(), column.is_null().to_pylist()
    return [
        None if missing else flat[start:end].copy() for start, end, missing in zip(ends, ends[1:], absent, strict=False)
    ]


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values, without the optional fields that are empty."""
    row = {name: getattr(verdict, name) for name in ("score", "correct", "status", "answer", "detail")}
    more = {name: getattr(verdict, name) for name in ("parts", "extra", "metrics")}
    return row | {name: value for name, value in more.items() if value}


def verdict_of(row: Mapping[str, Any]) -> Verdict:
    """The verdict of a row, which the caller has to check. Raises TypeError, ValueError or AttributeError."""
    values = dict(row)
    parts = tuple(RewardPart(*part) for part in values.pop("parts", ()))
    metrics = {name: tuple(entry) for name, entry in values.pop("metrics", {}).items()}
    return Verdict(**values, parts=parts, metrics=metrics)  # type: ignore[arg-type]


def turn_row(turn: Turn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in Turn.__slots__}


def messages_json(messages: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> str | None:
    """A conversation, or an episode, as JSON; None for an empty one."""
    return json.dumps(messages, ensure_ascii=False) if messages else None


def _of_json(text: bytes | None, empty: Any) -> Any:
    try:
        return empty if text is None else json.loads(text.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("it has messages that are nested too deeply") from None


def _messages_of(text: bytes | None) -> tuple[Mapping[str, Any], ...]:
    messages = _of_json(text, [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("it has messages that are not a list of objects")
    return tuple(messages)


def _episode_of(text: bytes | None) -> Mapping[str, Any]:
    episode: Mapping[str, Any] = _of_json(text, {})
    if not isinstance(episode, dict):
        raise ValueError("it has an episode that is not an object")
    return episode
