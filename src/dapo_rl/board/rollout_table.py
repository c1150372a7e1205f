"""Reads rollout tables into the columns and types that a run writes, whatever the file has, and others by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dapo_rl.base.parquet import SizeLimit, TooLargeError, check_size, decoded_bytes, open_parquet, plain_type
from dapo_rl.base.quote import cut
from dapo_rl.base.reading import open_regular
from dapo_rl.board.files import LARGEST_COUNT, UnreadableError
from dapo_rl.runs.rollouts import SCHEMA

TYPES: dict[str, pa.DataType] = {field.name: field.type for field in SCHEMA}
"""Of every column that a run writes. The page shows all others by name."""
MOST_ROWS = 200_000
MOST_COLUMNS, MOST_VALUES, LONGEST_VALUE = 64, 200, 2000
"""Limits on the columns that the board does not know, such as those that reward functions add."""
FINE_BYTES, MOST_BYTES, MOST_DECODED = 256 << 20, 4 << 30, 16 << 30
"""Limits on the columns of a step: the size that a file of any size may have, that of the rows in memory at a time, and
that of all rows that are looked through for a group."""
MOST_ODD_BYTES = 32 << 20
"""Size of a column whose values are converted one by one; each takes many times its size in Python."""


def read_table(path: Path, columns: Iterable[str], draw: int | None = None, *, others: bool = False) -> pa.Table:
    """The columns of one group or of all; values that are missing or cannot be converted are null. `others` adds those
    that the board does not know."""
    wanted = list(dict.fromkeys(("draw", *columns)))
    try:
        with open_regular(str(path)) as opened, open_parquet(opened) as file:
            table = _read(opened, file, wanted, draw, others)
    except UnreadableError as error:
        raise UnreadableError(f"{path.name}: {error}") from None
    except TooLargeError as error:
        raise UnreadableError(f"{path.name}: too large to show: {error}") from None
    except FileNotFoundError:  # a running run deletes old ones, as log.keep_rollouts asks
        raise UnreadableError(f"{path.name}: was deleted just now") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableError(f"{path.name}: not a table of rollouts: {reason}") from None
    return table


def _read(opened: BinaryIO, file: pq.ParquetFile, wanted: list[str], draw: int | None, others: bool) -> pa.Table:
    """Reads row group by row group, and keeps the rows that are asked for."""
    names = file.schema_arrow.names
    unknown = unknown_columns(file.schema_arrow) if others else []
    columns = [name for name in (*wanted, *unknown) if name in names]
    if file.metadata.num_rows > MOST_ROWS:
        raise UnreadableError(f"too large to show: {file.metadata.num_rows} samples")
    check_size(opened, file, columns, SizeLimit(opened, FINE_BYTES, MOST_DECODED), of_value=0)
    limit = SizeLimit(opened, FINE_BYTES, MOST_BYTES)
    parts, rows, numbered = [], 0, 0
    for number in range(file.metadata.num_row_groups):
        table = file.read_row_group(number, columns=columns, use_threads=False)
        size = decoded_bytes(table)
        limit.count(size)
        part = _converted(table, wanted, unknown)
        rows, draws = rows + part.num_rows, part.column("draw")
        numbered += len(draws) - draws.null_count
        parts.append(part.filter(pc.is_valid(draws) if draw is None else pc.equal(draws, draw)))
        limit.count(int(parts[-1].nbytes) - size)
    if rows and not numbered:
        kind = file.schema_arrow.field(names.index("draw")).type if "draw" in names else "missing"
        raise UnreadableError(f"not a table of rollouts: the column draw is {kind}")
    return pa.concat_tables(parts) if parts else _converted(file.schema_arrow.empty_table(), wanted, unknown)


def _converted(table: pa.Table, wanted: list[str], unknown: list[str]) -> pa.Table:
    found = {}
    for name in wanted:
        places = table.schema.get_all_field_indices(name)
        column = table.column(places[0]) if places else pa.chunked_array([pa.nulls(table.num_rows)])
        found[name] = as_type(column, TYPES[name])
    for name in unknown:
        column = table.column(table.schema.get_all_field_indices(name)[0])
        found[name] = as_type(column, pa.string()) if _is_text(column.type) else column
    return pa.table(found)


def unknown_columns(schema: pa.Schema) -> list[str]:
    """Columns that the board does not read itself but can show."""
    kinds = {field.name: field.type for field in reversed(list(schema))}
    shown = [name for name in dict.fromkeys(schema.names) if name not in TYPES and is_showable(kinds[name])]
    return shown[:MOST_COLUMNS]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def as_type(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Casts a column; if that fails, converts value by value, with null for those that cannot be converted."""
    try:
        column = column.cast(plain_type(column.type))
        column = column.cast(wanted)
        column.validate(full=True)  # Parquet does not guarantee that text is UTF-8
        return column
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        few = decoded_bytes(column) <= MOST_ODD_BYTES
        return pa.chunked_array([_one_by_one(column, wanted) if few else pa.nulls(len(column), wanted)], wanted)


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


def is_showable(kind: pa.DataType) -> bool:
    """Whether values of a type are scalars, or mappings of names to them."""
    if pa.types.is_dictionary(kind):
        return is_showable(kind.value_type)
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)) or (
        pa.types.is_map(kind) or pa.types.is_struct(kind)
    )


def extras_of(table: pa.Table, names: Iterable[str]) -> list[dict[str, Any]]:
    """The values of each row by name; those of a mapping by `column.name`. Missing values are left out."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name in names:
        for row, scalar in zip(rows, table.column(name), strict=True):
            for key, value in _named(name, _python(scalar)):
                if (shown := _plain(value)) is not None and len(row) < MOST_VALUES:
                    row[cut(key, LONGEST_VALUE)] = shown
    return rows


def _python(scalar: pa.Scalar) -> Any:
    try:
        if isinstance(scalar, pa.MapScalar) and scalar.is_valid:
            first = scalar.values.slice(0, MOST_VALUES).to_pylist()
            return [(entry["key"], entry["value"]) for entry in first]
        return scalar.as_py()
    except Exception:  # a date out of Python's range, text that is not UTF-8, …
        return None


def _named(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}.{key}", inner) for key, inner in value.items()]
    if isinstance(value, list):  # a map
        return [(f"{name}.{key}", inner) for key, inner in value]
    return [(name, value)]


def _plain(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, dict | list | tuple | bytes):
        return None
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= LARGEST_COUNT):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return cut(str(value), LONGEST_VALUE)
