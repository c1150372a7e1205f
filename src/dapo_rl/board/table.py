"""Reads rollout tables into the columns and types that a run writes, whatever types the file has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dapo_rl.board.files import UnreadableError, open_regular
from dapo_rl.runs.rollouts import SCHEMA

TYPES: dict[str, pa.DataType] = {field.name: field.type for field in SCHEMA}
"""Of every column that the board reads."""
MOST_ROWS, MOST_BYTES = 200_000, 4 << 30
"""Limits on the samples of a step and their size, far beyond what a page can show."""


def read_table(path: Path, columns: Iterable[str], draw: int | None = None) -> pa.Table:
    """The columns of one group or of all; values that are missing or cannot be converted are null."""
    wanted = list(dict.fromkeys(("draw", *columns)))
    try:
        with open_regular(str(path)) as opened, pq.ParquetFile(opened) as file:
            table = _read(file, wanted)
    except UnreadableError as error:
        raise UnreadableError(f"{path.name}: {error}") from None
    except FileNotFoundError:  # a running run deletes old ones, as log.keep_rollouts asks
        raise UnreadableError(f"{path.name}: was deleted just now") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableError(f"{path.name}: not a table of rollouts: {reason}") from None
    draws = table.column("draw")
    return table.filter(pc.is_valid(draws) if draw is None else pc.equal(draws, draw))


def _read(file: pq.ParquetFile, wanted: list[str]) -> pa.Table:
    here = file.metadata
    size = sum(here.row_group(i).total_byte_size for i in range(here.num_row_groups))
    if here.num_rows > MOST_ROWS or size > MOST_BYTES:
        raise UnreadableError(f"too large to show: {here.num_rows} samples, {size >> 20} MiB")
    names = file.schema_arrow.names
    table = file.read(columns=[name for name in wanted if name in names])
    found = {}
    for name in wanted:
        places = table.schema.get_all_field_indices(name)
        column = table.column(places[0]) if places else pa.chunked_array([pa.nulls(table.num_rows)])
        found[name] = as_type(column, TYPES[name])
    if found["draw"].null_count == len(found["draw"]) > 0:
        kind = file.schema_arrow.field(names.index("draw")).type if "draw" in names else "missing"
        raise UnreadableError(f"not a table of rollouts: the column draw is {kind}")
    return pa.table(found)


def as_type(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Casts a column; if that fails, converts value by value, with null for those that cannot be converted."""
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        column = column.cast(wanted)
        column.validate(full=True)  # Parquet does not guarantee that text is UTF-8
        return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return pa.chunked_array([_one_by_one(column, wanted)], wanted)


def _one_by_one(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    values: list[Any] = []
    for scalar in column:
        try:
            value = scalar.as_py()
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            values.append(pa.scalar(text).cast(wanted).as_py())
        except Exception:  # a date out of Python's range, a nested list, …
            values.append(None)
    return pa.array(values, wanted)
