"""Reads and validates lines of metrics.jsonl, and summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dapo_rl.base.reading import read_bytes

LARGEST_STEP, LARGEST = 2**53, 1e100
"""Limits well above the values of real runs; larger numbers would overflow in sums and plots."""
MOST_BYTES = 16 << 20
"""Size limit of a summary and of a line of metrics, which usually takes a few KiB."""


def parse_metrics(line: bytes) -> dict[str, Any]:
    """Parses a line of metrics.jsonl; raises ValueError with the reason if it is invalid."""
    try:
        record = json.loads(line) if len(line) <= MOST_BYTES else None
    except RecursionError:
        record = None
    if not isinstance(record, dict):
        raise ValueError("not a mapping of names to numbers")
    step = record.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise ValueError("'step' is not a step number")
    for name, value in record.items():
        if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):
            raise ValueError(f"{name[:80]!r} is not a number")
    return record


_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Step = Annotated[int, Field(ge=0, lt=LARGEST_STEP)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _EvaluationRecord(_Record):
    step: _Step
    accuracy: _Number | None


class Summary(_Record):
    finished: bool
    steps: _Step
    accuracy_before: _Number | None = None
    accuracy_after: _Number | None = None
    wall_seconds: _Number | None = None
    tokens: dict[str, Annotated[_Number, Field(ge=0)] | None] | None = None
    evaluations: list[_EvaluationRecord] | None = None


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run; empty if it is missing or invalid. Resuming the run writes a new one."""
    try:
        summary = json.loads(read_bytes(path, MOST_BYTES))
        Summary.model_validate(summary)
    except (OSError, ValueError, RecursionError, ValidationError):
        return {}
    assert isinstance(summary, dict)
    return summary
