"""Reads Parquet files that may be hostile: compression and encodings can make terabytes of a few kilobytes.

The memory that a file can take follows from its page headers, and is checked before anything is decoded. Texts are read
as dictionaries: a text that is repeated a million times is stored once, until the sizes of a batch are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dapo_rl.base.parquet_pages import DATA, DATA_V2, DELTA_BYTE_ARRAY, PageError, pages_of
from dapo_rl.base.quote import one_line
from dapo_rl.errors import UserError

LARGEST_FOOTER = 64 << 20
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
PLACE = 8
"""Bytes per value besides itself: of a text its place in the dictionary, of the items of a list their levels."""
PYTHON_VALUE = 32
"""Bytes of a number as an object in a list."""
TIMES, FINE, MOST = 500, 1 << 30, 1 << 62
"""How many times its own size a file may decode to, a size that is fine for any file, and one that is too large."""
FINE_WRITTEN_OUT = 16 << 30
"""The same for all batches together, in which repeated texts count every time."""
ROWS, BATCH_BYTES = 4096, 64 << 20
"""Of a batch, at most. A larger row is a separate batch."""


class TooLargeError(ValueError):
    """A file decodes to more than it may."""


def open_parquet(file: BinaryIO) -> pq.ParquetFile:
    """Opens a file so that texts are read as dictionaries. Raises pyarrow's errors for one that is damaged."""
    end = file.seek(0, 2)
    file.seek(max(0, end - 8))
    footer = int.from_bytes(file.read(4), "little")
    if LARGEST_FOOTER < footer < end:  # pyarrow says what is wrong with a length that is too large
        raise TooLargeError(f"it has a footer of {footer >> 20:,} MiB")
    schema = pq.ParquetFile(file).schema
    columns = [schema.column(i) for i in range(len(schema))]
    texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type != "DECIMAL"]
    return pq.ParquetFile(file, read_dictionary=texts)


class SizeLimit:
    def __init__(self, file: BinaryIO, fine: int = FINE, most: int = MOST) -> None:
        """`TIMES` the size of the file, up to `most`; `fine` bytes are allowed to every file."""
        self._own = file.seek(0, 2)
        self._limit = min(max(fine, TIMES * self._own), most)
        self._counted = 0

    def count(self, size: int) -> None:
        """Raises TooLargeError if the sum of all sizes so far is too large."""
        self._counted += size
        if self._counted > self._limit:
            own = max(1, self._own >> 10)
            raise TooLargeError(f"it decodes to more than {self._limit >> 20:,} MiB, from a file of {own:,} KiB")


def check_size(
    file: BinaryIO,
    table: pq.ParquetFile,
    columns: Collection[str] | None = None,
    limit: SizeLimit | None = None,
    of_value: int = PYTHON_VALUE,
) -> None:
    """Raises TooLargeError if the columns can decode to more than the limit. Repeated texts count once; `of_value` is
    added for every value."""
    limit = limit or SizeLimit(file)
    for group in range(table.metadata.num_row_groups):
        for size in _sizes(file, table.metadata.row_group(group), table.metadata.schema, columns, of_value):
            limit.count(size)


def _sizes(file: BinaryIO, group: Any, schema: Any, columns: Collection[str] | None, of_value: int) -> Iterator[int]:
    """What each page of a row group can take in memory."""
    for at in range(group.num_columns):
        chunk = group.column(at)
        path, values = chunk.path_in_schema, 0
        if columns is not None and not any(path == name or path.startswith(f"{name}.") for name in columns):
            continue
        column = schema.column(at)
        width = WIDTHS.get(column.physical_type, column.length or 0) + PLACE + of_value
        starts = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset]
        start = min(starts, default=0)
        for page in pages_of(file, start, start + chunk.total_compressed_size):
            values += page.values if page.kind in (DATA, DATA_V2) else 0
            # There a value may repeat most of the one before.
            is_prefixed = page.encoding == DELTA_BYTE_ARRAY and page.kind in (DATA, DATA_V2)
            yield page.values * (page.size * is_prefixed + width) + page.size
        if values < max(group.num_rows, chunk.num_values):
            raise PageError(f"{path} has {values} values, not {max(group.num_rows, chunk.num_values)}")


def batches(file: BinaryIO, table: pq.ParquetFile) -> Iterator[pa.RecordBatch | None]:
    """The rows in batches of at most `ROWS` rows and `BATCH_BYTES`; None stands for a single row that is larger."""
    check_size(file, table)
    if not table.schema_arrow.names and table.metadata.num_rows:
        raise PageError(f"it has {table.metadata.num_rows} rows and no column")
    limit = SizeLimit(file, FINE_WRITTEN_OUT)
    for group in range(table.metadata.num_row_groups):  # each has dictionaries of its own
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], use_threads=False):
            limit.count(decoded_bytes(batch))
            yield from _parts(batch)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch | None]:
    if decoded_bytes(batch) <= BATCH_BYTES:
        yield written_out(batch)
    elif batch.num_rows == 1:
        yield None
    else:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))


def written_out(batch: Any) -> Any:
    """A batch or table with texts in place of dictionaries; Python converts them in a quarter of the time."""
    try:
        return batch.cast(pa.schema([field.with_type(plain_type(field.type)) for field in batch.schema]))
    except pa.ArrowException:  # a type that has no such cast, such as a map
        return batch


def plain_type(kind: pa.DataType) -> pa.DataType:
    return converted_type(kind, lambda inner: inner.value_type if pa.types.is_dictionary(inner) else inner)


def converted_type(kind: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type, with all types inside structs and lists converted."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(converted_type(field.type, convert)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(converted_type(kind.value_type, convert)))
    return convert(kind)


def decoded_bytes(data: Any) -> int:
    """The size of a table, batch or array with every text written out."""
    if isinstance(data, pa.Table | pa.RecordBatch | pa.ChunkedArray):
        parts = data.chunks if isinstance(data, pa.ChunkedArray) else data.columns
        return sum(decoded_bytes(part) for part in parts)
    if pa.types.is_dictionary(data.type):
        lengths = pc.binary_length(data.dictionary).cast(pa.int64())
        return (pc.sum(lengths.take(data.indices)).as_py() or 0) + PLACE * len(data)
    if isinstance(data, pa.ExtensionArray):
        return decoded_bytes(data.storage)
    if isinstance(data, pa.StructArray):
        return sum(decoded_bytes(inner) for inner in data.flatten())
    if isinstance(data, pa.MapArray):
        first, last = data.offsets[0].as_py(), data.offsets[-1].as_py()
        return sum(decoded_bytes(side.slice(first, last - first)) for side in (data.keys, data.items))
    if hasattr(data, "flatten"):  # lists of all kinds
        return decoded_bytes(data.flatten()) + PLACE * len(data)
    return int(data.nbytes)


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """The columns of a table that fits in memory. Raises a UserError if the file is damaged or too large."""
    try:
        return read_parquet(path, columns)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {one_line(error)}") from None


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A table that fits in memory, all its columns by default."""
    with path.open("rb") as opened, open_parquet(opened) as file:
        check_size(opened, file, columns)
        names = list(file.schema_arrow.names if columns is None else columns)
        limit, parts = SizeLimit(opened), [file.schema_arrow.empty_table().select(names)]
        for number in range(file.metadata.num_row_groups):
            parts.append(file.read_row_group(number, columns=names, use_threads=False))
            limit.count(decoded_bytes(parts[-1]))
        return pa.concat_tables([written_out(part) for part in parts])
