"""Rows of a source as plain Python values, and why some cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_rl.base.unicode import is_unicode
from dapo_rl.data.media import refuse_media

MOST_BITS = 14_000
"""Of a whole number: Python writes no more than 4300 digits into JSON."""
MISSING = object()
"""In place of a column that a row does not have."""


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    """Position in the source: the line of a text file (from 1), otherwise the index (from 0)."""
    where: str
    """`train.jsonl:17`, `train.parquet:row 17`."""
    columns: dict[str, Any]
    origin: str = ""
    """The entry of a list of sources that it comes from; empty if there is no list."""

    @property
    def id(self) -> str:
        """The id of its prompt: unique in the data set."""
        return f"{self.origin}:{self.number}" if self.origin else str(self.number)

    def bad(self, why: BadRowError) -> BadRow:
        return BadRow(self.number, self.where, str(why), self.origin)


@dataclass(frozen=True, slots=True)
class BadRow:
    number: int
    where: str
    why: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Rows:
    key: str
    """The setting that names the source, for messages: `data.train`."""
    source: str
    """The source as the user wrote it; empty for rows passed in memory."""
    good: list[Row]
    bad: list[BadRow]
    origins: tuple[str, ...] = ()
    """The entries of a list of sources, in its order."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """Rows that are read as they are needed, because their number is not known; it may have no end."""

    key: str
    source: str
    open: Callable[[], Iterator[Row | BadRow]]
    """Starts at the first row."""
    repeats: bool
    """Whether it can be opened again. An iterator cannot."""


class BadRowError(ValueError):
    """Why a row cannot be used; the row is skipped and reported."""


def make_row(number: int, where: str, value: object) -> Row | BadRow:
    """Raises MediaError for a row with an image, video, audio or tools."""
    try:
        if not isinstance(value, Mapping):
            raise BadRowError(f"not a mapping of columns but a {type(value).__name__}")
        odd = [name for name in value if not isinstance(name, str)]
        if odd:
            raise BadRowError(f"the column name {odd[0]!r} is not a string")
        refuse_media(where, value)
        return Row(number, where, {name: plain(inner) for name, inner in value.items()})
    except BadRowError as error:
        return BadRow(number, where, str(error))
    except RecursionError:
        return BadRow(number, where, "nested too deeply")


def column(columns: Mapping[str, Any], key: str) -> Any:
    """The column of that name, or the nested field that a dotted name addresses; a field's own name may have dots."""
    if key in columns:
        return columns[key]
    parts = key.split(".")
    for end in range(1, len(parts)):
        inner = columns.get(".".join(parts[:end]))
        if isinstance(inner, Mapping) and (found := column(inner, ".".join(parts[end:]))) is not MISSING:
            return found
    return MISSING


def plain(value: Any) -> Any:
    """Converts values of NumPy, torch and pandas to Python's own types; tuples stay tuples."""
    kind = type(value)
    if kind is int and value.bit_length() > MOST_BITS:
        raise BadRowError(f"it has a whole number of {value.bit_length():,} bits")
    if value is None or kind in (bool, int, float):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if kind is list:
        return [plain(inner) for inner in value]
    if kind is tuple:
        return tuple([plain(inner) for inner in value])
    if kind.__name__ in ("NAType", "NaTType"):  # pandas' missing values
        return None
    if hasattr(value, "tolist"):
        return plain(_from_numpy(value))
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime()
    return value


def _from_numpy(value: Any) -> Any:
    """`tolist`, except for times in nanoseconds, which it turns into integers, and for narrow floats, which it
    lengthens: 0.1 would become 0.10000000149011612."""
    dtype = getattr(value, "dtype", None)
    kind = getattr(dtype, "kind", "")
    if kind in ("M", "m") and str(dtype).endswith("[ns]"):
        return value.astype(f"{kind}8[us]").tolist()
    if kind == "f" and value.ndim == 0:
        return float(str(value))
    return value.tolist()


def _text(value: str) -> str:
    if not is_unicode(value):  # from JSON's \ud800, for example; tokenizers and Parquet reject it
        raise BadRowError("it has text that is not valid Unicode (half of a surrogate pair)")
    # Data sets repeat rows (avg@32 files, and DAPO-Math-17K a hundred times): equal texts are stored once.
    return sys.intern(str(value))
