"""The run log as columns, and curves out of it: few points of many steps, smoothed or as they are."""

from __future__ import annotations

import json
import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CHUNK = 8 << 20


class MetricsLog:
    """`metrics.jsonl`, read once: a later look reads only what was appended since, or all of a file that is new."""

    def __init__(self, find: Callable[[], Path | None]) -> None:
        """`find` says where the file is, once there is one."""
        self._find = find
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset = -1, 0
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        with self._lock:
            path = self._find()
            try:
                stat = path.stat() if path else None
            except OSError:
                stat = None
            if path is None or stat is None:
                self._forget()
                return
            if stat.st_ino != self._inode or stat.st_size < self._offset:  # a resumed run rewrites its log
                self._forget()
                self._inode = stat.st_ino
            if stat.st_size > self._offset:
                self._read_on(path)

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._add(line)
                    self._offset += len(line) + 1

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return  # what a crash left of a line
        if self._steps and step <= self._steps[-1]:
            self._cut(bisect_left(self._steps, step))
        before = len(self._steps)
        self._steps.append(step)
        for name, value in record.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d", [math.nan]) * before
            column.append(value if type(value) is float else _number(value))
        if len(record) < len(self._columns):
            for column in self._columns.values():
                if len(column) == before:
                    column.append(math.nan)

    def _cut(self, length: int) -> None:
        for column in (self._steps, *self._columns.values()):
            del column[length:]

    @property
    def offset(self) -> int:
        """Bytes read so far: grows whenever there is something new to see."""
        return self._offset

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    @property
    def last_step(self) -> int:
        with self._lock:
            return int(self._steps[-1]) if self._steps else 0

    def column(self, name: str, first: float = -math.inf, last: float = math.inf) -> tuple[Floats, Floats]:
        """Steps and values of a metric, without the steps that have none."""
        with self._lock:
            values = self._columns.get(name)
            if values is None:
                return np.empty(0), np.empty(0)
            here = slice(bisect_left(self._steps, first), bisect_right(self._steps, last))
            steps, numbers = np.array(self._steps[here]), np.array(values[here])
        known = np.isfinite(numbers)
        return steps[known], numbers[known]

    def total(self, name: str) -> float:
        return float(self.column(name)[1].sum())

    def latest(self, name: str, steps: int = 1) -> float | None:
        """The mean of the last values."""
        values = self.column(name)[1][-steps:]
        return float(values.mean()) if len(values) else None


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def thin(steps: Floats, values: Floats, points: int) -> tuple[Floats, Floats]:
    """At most `points` of a curve: the least and the greatest of each stretch, so that no spike is lost."""
    if len(steps) <= max(points, 4):
        return steps, values
    bounds = np.linspace(0, len(steps), max(points, 4) // 2, dtype=int)
    chosen = {0, len(steps) - 1}
    for start, end in pairwise(bounds):
        chosen |= {int(start + values[start:end].argmin()), int(start + values[start:end].argmax())}
    index = np.array(sorted(chosen))
    return steps[index], values[index]


def smooth(steps: Floats, values: Floats, share: float, points: int) -> tuple[Floats, Floats]:
    """An exponential moving average over about `share` of the curve, at most `points` long.

    A long curve is averaged in stretches first: what those hide is far below the width of the average.
    """
    if len(steps) > points:
        bounds = np.linspace(0, len(steps), points + 1, dtype=int)[:-1]
        sizes = np.diff([*bounds, len(steps)])
        last = np.array([*bounds[1:], len(steps)]) - 1
        steps, values = steps[last], np.add.reduceat(values, bounds) / sizes
    keep = 1 - 2 / (max(1.0, share * len(steps)) + 1)
    result, average, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result[i] = average / weight
    return steps, result


def curve(
    log: MetricsLog, name: str, *, points: int, share: float, first: float = -math.inf, last: float = math.inf
) -> dict[str, Any]:
    """A metric for the page: the raw line, and the smoothed one."""
    steps, values = log.column(name, first, last)
    return {
        "raw": _plain(*thin(steps, values, points)),
        "smooth": _plain(*smooth(steps, values, share, points // 2)),
        "steps": len(steps),
    }


def with_start(curve: dict[str, Any], evaluations: Mapping[int, float]) -> dict[str, Any]:
    """The evaluation before the first step has no line in the log."""
    if 0 not in evaluations or (curve["raw"][0] and curve["raw"][0][0] <= 0):
        return curve
    start = evaluations[0]
    return curve | {key: [[0, *curve[key][0]], [start, *curve[key][1]]] for key in ("raw", "smooth")}


def _plain(steps: Floats, values: Floats) -> list[list[float]]:
    return [[int(step) for step in steps], [float(f"{value:.6g}") for value in values]]
