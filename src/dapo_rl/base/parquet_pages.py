"""The page headers of a Parquet file: what its pages decode to, before any of them is decompressed.

The footer states sizes too, but no reader checks them. A reader does allocate what a page header states, and
decompresses no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

DATA, INDEX, DICTIONARY, DATA_V2 = range(4)
DELTA_BYTE_ARRAY = 7
_WINDOW, _LARGEST_HEADER = 1 << 10, 16 << 20
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


class PageError(ValueError):
    """The pages are not what the format and the footer say."""


@dataclass(frozen=True, slots=True)
class Page:
    kind: int
    size: int
    """Bytes after decompression."""
    values: int
    """Nulls and empty lists included."""
    encoding: int


def pages_of(file: BinaryIO, start: int, stop: int) -> Iterator[Page]:
    """The pages of a column chunk, which has these bytes of the file."""
    while start < stop:
        fields, length = _header(file, start, stop)
        kind, size, stored = (_count(fields, number) for number in (1, 2, 3))
        inner = fields.get({DATA: 5, DICTIONARY: 7, DATA_V2: 8}.get(kind, 0)) or {}
        # The encoding is the second field of a header, and the fourth in the second version.
        page = Page(kind, size, _count(inner, 1) if inner else 0, inner.get(4 if kind == DATA_V2 else 2, 0))
        if start + length + stored > stop:
            raise PageError("a page is cut off")
        yield page
        start += length + stored


def _count(fields: dict[int, Any], number: int) -> int:
    value = fields.get(number)
    if type(value) is not int or value < 0:
        raise PageError("a page header is damaged")
    return value


def _header(file: BinaryIO, start: int, stop: int) -> tuple[dict[int, Any], int]:
    """The fields of a header, and its length. Statistics can make it long."""
    window = _WINDOW
    while True:
        file.seek(start)
        content = file.read(min(window, stop - start))
        reader = _Compact(content)
        try:
            return reader.struct(), reader.at
        except IndexError:
            if len(content) < window or window >= _LARGEST_HEADER:
                raise PageError("a page header is cut off") from None
            window *= 16


class _Compact:
    """Reads a struct in Thrift's compact protocol: whole numbers and structs by field number, other fields skipped."""

    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > 8:
            raise PageError("a page header is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_BYTE, _DOUBLE, _BINARY):
            self._skip({_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint())
            return None
        raise PageError("a page header has a field of an unknown type")

    def _skip(self, length: int) -> None:
        self.at += length
        if self.at > len(self._content):
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise PageError("a page header has a number that is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
