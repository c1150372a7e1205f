"""Rows from files: JSON Lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dapo_rl.base.home import expanded
from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import did_you_mean, nearest_path
from dapo_rl.data.rows import BadRow, Row, make_row
from dapo_rl.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
LONGEST_LINE = 64 << 20


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A file that a recipe of the package reads, and where to get it."""

    columns: str
    source: str
    """Its data set on the Hub."""
    parameters: tuple[tuple[str, str], ...] = ()

    def how_to_get(self, key: str) -> str:
        """The settings that read it from the Hub, and what a file of one's own must contain."""
        words = [f"{key}={self.source}", *(f"{key}.{name}={value}" for name, value in self.parameters)]
        return (
            f"{' '.join(words)} reads it from the Hub (pip install 'dapo-rl[datasets]'); or put a file with the "
            f"columns {self.columns} there"
        )


_MAIN = ("name", "main")

RECIPE_FILES = {
    "gsm8k-train.jsonl": RecipeFile("question and answer", "openai/gsm8k", (_MAIN,)),
    "gsm8k-test.jsonl": RecipeFile("question and answer", "openai/gsm8k", (_MAIN, ("split", "test"))),
    "aime-2024.parquet": RecipeFile("prompt and reward_model.ground_truth", "BytedTsinghua-SIA/AIME-2024"),
}


def read_file(path: Path, key: str) -> Iterator[Row | BadRow]:
    path = expanded(path)
    if not path.is_file():
        raise UserError(f"{key}: {path}: {_what_is_missing(path, key)}")
    return _read_parquet(path, key) if path.suffix.lower() == ".parquet" else _read_jsonl(path, key)


def _what_is_missing(path: Path, key: str) -> str:
    if path.exists():
        return "not a file"
    if "," in str(path):
        return f"no such file; a list of files is written '{key}=[{path}]'"
    if known := RECIPE_FILES.get(path.name):
        where = "the working directory" if path.parent == Path() else str(path.parent)
        return f"no such file in {where}; {known.how_to_get(key)}"
    if not path.parent.is_dir():
        return f"no such file; there is no directory {path.parent}"
    return f"no such file{did_you_mean(nearest_path(path, _is_readable, cutoff=0.4))}"


def _is_readable(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def _read_jsonl(path: Path, key: str) -> Iterator[Row | BadRow]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield _parse_line(number, f"{path.name}:{number}", line)
    except OSError as error:
        raise UserError(f"{key}: {path}: cannot be read: {one_line(error)}") from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. Of a line that is too long (a file of zeros is one line), only the beginning."""
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 1)
        yield line


def _parse_line(number: int, where: str, line: bytes) -> Row | BadRow:
    if len(line) > LONGEST_LINE:
        return BadRow(number, where, f"a line of more than {LONGEST_LINE >> 20} MiB; a line holds one object")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow(number, where, "not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(number, where, f"not valid JSON: {error.msg} at column {error.colno}; a line holds one object")
    except RecursionError:
        return BadRow(number, where, "nested too deeply")
    except ValueError as error:  # a number with more digits than Python converts
        return BadRow(number, where, f"not valid JSON: {one_line(error)}")
    if not isinstance(value, dict):
        return BadRow(number, where, f"not a JSON object but a {type(value).__name__}; a line holds one object")
    return make_row(number, where, value)


def _read_parquet(path: Path, key: str) -> Iterator[Row | BadRow]:
    import pyarrow

    from dapo_rl.base.parquet import BATCH_BYTES, batches, open_parquet

    number = 0
    try:
        with path.open("rb") as opened, open_parquet(opened) as file:
            # pandas stores its index as a column of the file, which is not part of the data.
            index = [name for name in file.schema_arrow.names if name.startswith("__index_level_")]
            for batch in batches(opened, file):
                if batch is None:
                    yield BadRow(number, f"{path.name}:row {number}", f"a row of more than {BATCH_BYTES >> 20} MiB")
                    number += 1
                    continue
                for value in _widened(batch.drop_columns(index)).to_pylist():
                    yield make_row(number, f"{path.name}:row {number}", value)
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:  # a date, a time zone
        after = f" after row {number - 1}" if number else ""
        raise UserError(f"{key}: {path}: cannot be read as parquet{after}: {one_line(error)}") from None


def _widened(batch: Any) -> Any:
    """Converts float32 by its decimal digits: 0.1 stays 0.1 instead of 0.10000000149011612."""
    import pyarrow as pa

    from dapo_rl.base.parquet import converted_type

    def with_floats(kind: Any, instead: Any) -> Any:
        return converted_type(kind, lambda inner: instead if pa.types.is_float32(inner) else inner)

    for at, field in enumerate(batch.schema):
        if (texts := with_floats(field.type, pa.string())) != field.type:
            digits = batch.column(at).cast(texts)
            batch = batch.set_column(at, field.name, digits.cast(with_floats(field.type, pa.float64())))
    return batch
