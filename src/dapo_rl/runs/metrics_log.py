"""metrics.jsonl as columns, read as it grows."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dapo_rl.base.reading import open_regular

Floats = NDArray[np.float64]
LONGEST_LINE = 1 << 20
SEAM = 256
"""The last bytes that were read are compared before reading on; if they differ, it is another file."""
LARGEST_LOG = 1 << 30
MOST_NAMES, LONGEST_NAME = 1000, 200
MOST_VALUES = 64 << 20
"""Limits far above those of real runs; anything beyond them is ignored."""
LAST_STEP = 10**12


class MetricsLog:
    """`metrics.jsonl`, read incrementally: each refresh reads the appended lines, or the whole file if it is new."""

    def __init__(self, find: Callable[[], Path | None], names: Set[str] | None = None) -> None:
        """`find` returns the path once the file exists; `names` are the metrics to keep, by default all."""
        self._find = find
        self._names = names
        self._lock = threading.Lock()
        self._empty()

    def forget(self) -> None:
        """Frees the memory; the next refresh reads the log again."""
        with self._lock:
            self._empty()

    def _empty(self) -> None:
        self._inode, self._offset, self._seam = -1, 0, b""
        self._inside_a_line = False
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}
        self._skipped = 0
        self._is_cut = False  # at the size limit of a log
        self._failure: str | None = None
        self.is_behind = False
        """Whether the last refresh stopped before the end of the file."""

    def refresh(self, most: int = LARGEST_LOG) -> None:
        """Reads new lines, about `most` bytes at a time."""
        with self._lock:
            try:
                path = self._find()
                stat = path.stat() if path else None
                if path is None or stat is None:
                    self._empty()
                    return
                if stat.st_ino != self._inode or stat.st_size < self._offset:  # a resumed run rewrites its log
                    self._empty()
                    self._inode = stat.st_ino
                self.is_behind = False
                if stat.st_size > self._offset and not self._is_cut:
                    self._read_on(path, self._offset + most)
            except OSError as error:
                self._empty()
                self._failure = error.strerror or str(error)

    def _read_on(self, path: Path, end: int) -> None:
        with open_regular(str(path)) as file:
            # A file that replaced another twice can have its inode again, and be longer than it was.
            if _before(file, self._offset) != self._seam:
                self._empty()
                self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            while not self._is_cut and self._offset < end:
                line = file.readline(LONGEST_LINE + 1)
                if not line.endswith(b"\n") and len(line) <= LONGEST_LINE:  # the end of the file
                    break
                self._take(line)
            else:
                self.is_behind = not self._is_cut
            self._seam = _before(file, self._offset)

    def _take(self, line: bytes) -> None:
        """A line that is too long comes in parts, of which the last has its end."""
        self._offset += len(line)
        is_whole = line.endswith(b"\n")
        if not self._inside_a_line:
            self._skipped += not is_whole
            if is_whole and line.strip():
                self._add(line)
        self._inside_a_line = not is_whole
        values = len(self._steps) * (1 + len(self._columns))
        self._is_cut = self._offset >= LARGEST_LOG or values >= MOST_VALUES

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = _step(record.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            step = None
        if step is None or len(record) > MOST_NAMES:
            self._skipped += 1
            return
        if self._steps and step <= self._steps[-1]:
            self._cut(bisect_left(self._steps, step))
        before = len(self._steps)
        self._steps.append(step)
        for name in record if self._names is None else self._names & record.keys():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_NAMES or len(name) > LONGEST_NAME:
                    continue
                column = self._columns[name] = array("d", [math.nan]) * before
            value = record[name]
            column.append(value if type(value) is float else _number(value))
        for column in self._columns.values():
            if len(column) == before:
                column.append(math.nan)

    def _cut(self, length: int) -> None:
        for column in (self._steps, *self._columns.values()):
            del column[length:]

    @property
    def offset(self) -> int:
        """Bytes read so far: grows whenever there is something new."""
        return self._offset

    @property
    def problem(self) -> str | None:
        """Describes skipped lines, in one line; None if all were read."""
        if self._is_cut:
            return f"too long, read up to step {self.last_step}"
        if self._skipped:
            return f"{self._skipped} {'line' if self._skipped == 1 else 'lines'} skipped: not the metrics of a step"
        return self._failure

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    @property
    def last_step(self) -> int:
        with self._lock:
            return int(self._steps[-1]) if self._steps else 0

    def column(self, name: str, first: float = -math.inf, last: float = math.inf) -> tuple[Floats, Floats]:
        """Steps and values of a metric, without steps that lack it."""
        with self._lock:
            values = self._columns.get(name)
            if values is None:
                return np.empty(0), np.empty(0)
            here = slice(bisect_left(self._steps, first), bisect_right(self._steps, last))
            steps, numbers = np.array(self._steps[here]), np.array(values[here])
        known = np.isfinite(numbers)
        return steps[known], numbers[known]

    def total(self, name: str) -> float:
        with np.errstate(over="ignore"):
            return float(self.column(name)[1].sum())

    def latest(self, name: str, steps: int = 1) -> float | None:
        """The mean of the last values."""
        values = self.column(name)[1][-steps:]
        with np.errstate(over="ignore"):
            return float(values.mean()) if len(values) else None


def _before(file: BinaryIO, end: int) -> bytes:
    file.seek(max(0, end - SEAM))
    return file.read(min(SEAM, end))


def _step(value: Any) -> int | None:
    """A valid step number, otherwise None."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= LAST_STEP else None


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
