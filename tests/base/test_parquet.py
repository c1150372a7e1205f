"""Parquet files of a few kilobytes that decode to gigabytes, and honest ones beside them."""

import io
from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_rl.base import parquet
from dapo_rl.base.parquet import (
    SizeLimit,
    TooLargeError,
    batches,
    check_size,
    decoded_bytes,
    open_parquet,
    read_columns,
)
from dapo_rl.base.parquet_pages import PageError, pages_of
from dapo_rl.data import load_rows
from dapo_rl.errors import UserError


def repeated(text: str, count: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))


def one_list(length: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), pa.array(np.zeros(length, np.int32)))


def written(table: pa.Table, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(table, file, **{"compression": "zstd", **options})
    return file


def read(file: io.BytesIO) -> list[dict]:
    with open_parquet(file) as table:
        return [row for batch in batches(file, table) for row in (batch.to_pylist() if batch else [None])]


BOMBS = {
    # Zeros, which compress to nothing.
    "text": lambda: written(pa.table({"a": [f"{'x' * (2 << 20)}{i}" for i in range(9)]}), use_dictionary=False),
    # A row whose items are one value, run-length encoded: the footer states 200 bytes.
    "list": lambda: written(pa.table({"a": one_list(1_000_000)})),
    # Rows of one value, run-length encoded.
    "rows": lambda: written(pa.table({"a": repeated("x", 1_000_000)})),
    # Each value is the one before.
    "prefixes": lambda: written(
        pa.table({"a": ["x" * (1 << 16)] * 300}), use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"}
    ),
    # Nulls take the width of their type.
    "width": lambda: written(pa.table({"a": pa.nulls(20, pa.binary(1 << 20))})),
}


@pytest.fixture
def small_limits(monkeypatch):
    """A hundredth of the limits, so that files a hundredth as large show them."""
    monkeypatch.setattr(SizeLimit, "__init__", partialmethod(SizeLimit.__init__, fine=16 << 20))
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 20)


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_decodes_to_far_more_than_its_size_is_refused_before_it_is_decoded(name, small_limits):
    file = BOMBS[name]()
    assert file.seek(0, 2) < 20_000
    with open_parquet(file) as table, pytest.raises(TooLargeError, match="it decodes to more than 16 MiB"):
        check_size(file, table)


def test_one_text_stored_once_is_never_written_out_as_a_whole(monkeypatch):
    """A megabyte, repeated 300 times by a dictionary: the page headers tell nothing of that."""
    monkeypatch.setattr(parquet, "FINE_WRITTEN_OUT", 200 << 20)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(parquet, "ROWS", 100)
    file, sizes = written(pa.table({"a": repeated("x" * (1 << 20), 300)})), []
    assert file.seek(0, 2) < 5000
    with open_parquet(file) as table, pytest.raises(TooLargeError, match="it decodes to more than 200 MiB"):
        sizes.extend(batch.nbytes for batch in batches(file, table))
    assert max(sizes, default=0) <= 4 << 20


def test_a_data_file_is_refused_in_one_line(tmp_path, small_limits):
    path = tmp_path / "train.parquet"
    path.write_bytes(BOMBS["rows"]().getvalue())
    with pytest.raises(UserError, match=r"data.train: .*train.parquet: cannot be read as parquet: it decodes to more"):
        load_rows(path)


def test_a_column_with_a_dot_in_its_name_counts(small_limits):
    file = written(pa.table({"a.b": one_list(1_000_000), "c": [1]}))
    with open_parquet(file) as table:
        check_size(file, table, ["c"])
        with pytest.raises(TooLargeError):
            check_size(file, table, ["a.b"])


def test_sizes_in_the_footer_are_not_believed():
    """A page says that it has a million values; the footer of the same file says ten."""
    file = written(pa.table({"a": one_list(1_000_000)}), compression="none", use_dictionary=False)
    with open_parquet(file) as table:
        chunk = table.metadata.row_group(0).column(0)
        start = chunk.data_page_offset
        sizes = list(pages_of(file, start, start + chunk.total_compressed_size))
    assert sum(page.values for page in sizes) == 1_000_000
    assert sum(page.size for page in sizes) > 4_000_000
    for broken in (start + 1, start + 7):
        with pytest.raises(PageError):
            list(pages_of(file, broken, start + chunk.total_compressed_size))


def test_more_rows_than_values_are_refused():
    """The footer may state any number."""
    file = written(pa.table({"a": [1, 2, 3]}), compression="none", use_dictionary=False)
    with open_parquet(file) as table:
        group = table.metadata.row_group(0)
        forged = SimpleNamespace(num_columns=1, num_rows=10**9, column=group.column)
        with pytest.raises(PageError, match="a has 3 values, not 1000000000"):
            list(parquet._sizes(file, forged, table.metadata.schema, None, 0))


def test_rows_without_columns_do_not_come_without_end():
    metadata = SimpleNamespace(num_row_groups=0, num_rows=10**9)
    table = SimpleNamespace(schema_arrow=pa.schema([]), metadata=metadata)
    with pytest.raises(PageError, match="1000000000 rows and no column"):
        next(batches(io.BytesIO(), table))


def test_honest_files_come_back_as_they_were():
    """A megabyte of repeated rows, nested and sparse, in row groups: what every reader returns."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i % 7}+1=?" * 20}], "truth": {"answer": str(i)}, "n": i, "x": i / 8}
        | {"none": None, "bytes": b"\xff", "empty": [], "pairs": [("k", f"v{i}")]}
        for i in range(5000)
    ]
    schema = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "pairs"} for row in rows])
    table = schema.append_column("pairs", pa.array([r["pairs"] for r in rows], pa.map_(pa.string(), pa.string())))
    for options in ({}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"row_group_size": 700}):
        assert read(written(table, **options)) == rows


def test_batches_keep_to_their_size_and_large_rows_stand_alone(monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", 10_000)
    texts = ["a" * 3000, "b" * 20_000, "c" * 3000, "d" * 3000, "e" * 9000]
    file = written(pa.table({"a": texts}))
    with open_parquet(file) as table:
        found = [batch.column("a").to_pylist() if batch else None for batch in batches(file, table)]
    assert [text for part in found for text in part or ["b" * 20_000]] == texts
    assert None in found
    assert all(sum(map(len, part)) <= 10_000 for part in found if part)


def test_a_row_that_is_too_large_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 20)
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=?", "x" * (2 << 20), "2+2=?"], "answer": ["2", "3", "4"]}), path)
    rows = load_rows(path)
    assert [row.number for row in rows.good] == [0, 2]
    assert [str(row) for row in rows.bad] == ["train.parquet:row 1: a row of more than 1 MiB"]


def test_sizes_of_slices():
    texts = pa.array(["aa", "bbbb", None, "aa"]).dictionary_encode()
    assert decoded_bytes(texts) == 8 + 4 * parquet.PLACE
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 4], pa.int32()), texts)
    assert decoded_bytes(lists.slice(0, 1)) == 2 + 2 * parquet.PLACE
    assert decoded_bytes(pa.table({"a": lists, "b": lists})) == 2 * (8 + 6 * parquet.PLACE)


def test_the_limit_grows_with_the_file():
    small, large = io.BytesIO(b"x" * 10), io.BytesIO(b"x" * 1000)
    SizeLimit(small, fine=5000).count(5000)
    with pytest.raises(TooLargeError):
        SizeLimit(small, fine=5000).count(5001)
    limit = SizeLimit(large, fine=5000)
    limit.count(parquet.TIMES * 999)
    limit.count(parquet.TIMES)
    with pytest.raises(TooLargeError):
        limit.count(1)
    with pytest.raises(TooLargeError):
        SizeLimit(large, fine=10, most=1000).count(1001)


def test_columns_of_a_damaged_file_are_one_line(tmp_path, small_limits):
    path = tmp_path / "step.parquet"
    pq.write_table(pa.table({"a": ["x"], "b": [1]}), path)
    assert read_columns(path, ["b", "a"]).to_pylist() == [{"b": 1, "a": "x"}]
    for content in (b"", b"PAR1", path.read_bytes()[:-20], BOMBS["list"]().getvalue()):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as parquet"):
            read_columns(path, ["a"])
