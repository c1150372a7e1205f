"""The trajectories of a sampler's state, in the order in which the state names them: `trajectories.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dapo_rl.base.parquet import read_parquet
from dapo_rl.base.quote import one_line
from dapo_rl.codec import from_arrow, to_arrow
from dapo_rl.types import Array, Trajectory

FILE = "trajectories.parquet"
EARLIER_FILE = "samples.safetensors"
"""In checkpoints of 0.1.0 before trajectories: the samples one after the other, in columns."""


def write_trajectories(directory: Path, trajectories: Sequence[Trajectory]) -> None:
    pq.write_table(pa.Table.from_batches([to_arrow(trajectories)]), directory / FILE, compression="zstd")


def read_trajectories(directory: Path, longest: int, vocabulary: int) -> list[Trajectory]:
    """Raises ValueError for a file that does not fit a run with responses of at most `longest` tokens."""
    if (directory / FILE).exists():
        try:
            trajectories = from_arrow(read_parquet(directory / FILE))
        except (pa.ArrowException, LookupError, TypeError) as error:
            raise ValueError(one_line(error)) from None
    else:
        trajectories = _read_earlier(directory / EARLIER_FILE)
    for each in trajectories:
        if {"logps", "versions", "mask"} - each.columns.keys():
            raise ValueError("it has the wrong columns")
        if len(each.token_ids) > longest:
            raise ValueError("lengths are inconsistent")
        if each.token_ids.min(initial=0) < 0 or each.token_ids.max(initial=0) >= vocabulary:
            raise ValueError("it has tokens outside the vocabulary")
        if not np.isfinite(each.logps).all() or each.versions.min(initial=0) < 0:
            raise ValueError("it has invalid log-probabilities or versions")
    return trajectories


def trajectory_file(directory: Path) -> Path:
    """The file of a checkpoint, whichever it has."""
    earlier = directory / EARLIER_FILE
    return earlier if earlier.exists() and not (directory / FILE).exists() else directory / FILE


def _read_earlier(path: Path) -> list[Trajectory]:
    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    kinds = {"lengths": "int64", "token_ids": "int32", "logps": "float32", "versions": "int32", "mask": "bool"}
    kinds |= {"text_lengths": "int64", "texts": "uint8"}
    if {name: str(array.dtype) for name, array in arrays.items()} != kinds:
        raise ValueError("it has the wrong columns")
    if any(array.ndim != 1 for array in arrays.values()):
        raise ValueError("its columns are not one-dimensional")
    columns = {name: arrays[name] for name in ("token_ids", "logps", "versions", "mask")}
    ends, text_ends = _ends(arrays["lengths"], columns.values()), _ends(arrays["text_lengths"], [arrays["texts"]])
    if len(ends) != len(text_ends):
        raise ValueError("lengths are inconsistent")
    texts = arrays["texts"].tobytes()
    return [
        Trajectory(
            **{name: array[start:end] for name, array in columns.items()},
            text=texts[first:last].decode("utf-8", "surrogatepass"),
        )
        for (start, end), (first, last) in zip(ends, text_ends, strict=True)
    ]


def _ends(lengths: Array, columns: Iterable[Array]) -> list[tuple[int, int]]:
    """Where each part begins and ends. The lengths must cover the columns."""
    sizes = {len(column) for column in columns}
    if (lengths < 0).any() or any((lengths > size).any() or lengths.sum() != size for size in sizes):
        raise ValueError("lengths are inconsistent")
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends], ends, strict=False))
