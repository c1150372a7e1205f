"""TRL's `log_extra` and `log_metric`: values that a reward function logs during a call.

Names and values come from user code and end up in files, so they are limited. A value that cannot be logged raises an
exception in the function, which becomes a failed verdict with one line about it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shorten, shown
from dapo_rl.types import MOST_LOGGED, Loggable, Verdict

Value = TypeVar("Value")

LONGEST_NAME = 64
LONGEST_VALUE = 1000
"""Characters of a text that is logged; a longer one is shortened."""
LARGEST_METRIC = 1e30


class Logbook:
    """Collects the logged values of one call about `count` samples."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[Loggable]] = {}
        self.metrics: dict[str, tuple[float, int]] = {}
        """Sum and number of the values of each metric."""

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Logs a value for each completion."""
        _check_name("log_extra", column, self._columns)
        values = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise TypeError(f"log_extra({column!r}): expected a list of values, got {shown(values)}")
        if len(values) != self._count:
            given, wanted = counted(len(values), "value"), counted(self._count, "completion")
            raise ValueError(f"log_extra({column!r}): {given} for {wanted}")
        self._columns[column] = [_loggable(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number, which is averaged over the step."""
        _check_name("log_metric", name, self.metrics)
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, bool | int | float):
            raise TypeError(f"log_metric({name!r}): expected a number, got {shown(value)}")
        if not abs(number) <= LARGEST_METRIC:
            raise ValueError(f"log_metric({name!r}): {shown(number)} is not finite")
        total, count = self.metrics.get(name, (0.0, 0))
        self.metrics[name] = (total + float(number), count + 1)

    def extra(self, index: int) -> dict[str, Loggable]:
        """The logged values of one sample."""
        return {column: values[index] for column, values in self._columns.items()}


def with_metrics(verdicts: list[Verdict], logged: Sequence[Mapping[str, tuple[float, int]]]) -> list[Verdict]:
    """The verdicts of a call, the first of them with what all functions logged: a name that several log is averaged
    over all of them."""
    joined: dict[str, tuple[float, int]] = {}
    for metrics in logged:
        for name, (total, count) in metrics.items():
            before = joined.get(name, (0.0, 0))
            joined[name] = (before[0] + total, before[1] + count)
    return [replace(verdicts[0], metrics=limited(joined)), *verdicts[1:]] if joined and verdicts else verdicts


def limited(logged: dict[str, Value]) -> dict[str, Value]:
    """The first of more names than a verdict may have."""
    return dict(itertools.islice(logged.items(), MOST_LOGGED))


def fault_of_name(name: Any) -> str:
    """Why a name cannot be logged under; empty if it can."""
    if not isinstance(name, str):
        return f"a name is a string, not {shown(name)}"
    if not name.strip() or len(name) > LONGEST_NAME or name != name.strip() or not name.isprintable():
        return f"{shown(name)} is not a name of 1 to {LONGEST_NAME} printable characters"
    return ""


def fault_of_extra(extra: Any) -> str:
    """Why the `extra` of a verdict is invalid; empty if it is valid."""
    return _fault_of(extra, lambda value: "" if _is_logged(value) else "a value that cannot be logged")


def fault_of_metrics(metrics: Any) -> str:
    """Why the `metrics` of a verdict are invalid; empty if they are valid."""

    def fault_of_entry(entry: Any) -> str:
        if not (isinstance(entry, tuple) and len(entry) == 2 and type(entry[0]) is float and type(entry[1]) is int):
            return "something other than a sum and a count"
        in_range = math.isfinite(entry[0]) and 1 <= entry[1] < 2**53
        return "" if in_range else "a sum or a count that is out of range"

    return _fault_of(metrics, fault_of_entry)


def _fault_of(logged: Any, fault_of_value: Callable[[Any], str]) -> str:
    if not isinstance(logged, dict) or len(logged) > MOST_LOGGED:
        return f"is not a dict with at most {MOST_LOGGED} names"
    for name, value in logged.items():
        if fault := fault_of_name(name):
            return f"has a wrong name: {fault}"
        if fault := fault_of_value(value):
            return f"has {fault} for {name!r}"
    return ""


def _check_name(function: str, name: Any, so_far: dict[str, Any]) -> None:
    if fault := fault_of_name(name):
        raise ValueError(f"{function}: {fault}")
    if name not in so_far and len(so_far) >= MOST_LOGGED:
        raise ValueError(f"{function}({name!r}): there are {MOST_LOGGED} names already, which is the limit")


def _loggable(value: Any) -> Loggable:
    """A value as a run logs it: numbers and short texts as they are, anything else as text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    return shorten(str(value), LONGEST_VALUE)


def _is_logged(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= LONGEST_VALUE + 100
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool or (type(value) is int and abs(value) < 2**53)
