"""What a run wrote about itself, read back: lines of metrics.jsonl, and summary.json. Others may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dapo_rl.base.reading import read_bytes

LARGEST_STEP, LARGEST = 2**53, 1e100
"""Beyond what a run writes; sums and axes of larger numbers overflow."""
MOST_BYTES = 16 << 20
"""Of a summary; of a line of metrics, a few KiB are usual."""


def parse_metrics(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl; a ValueError says what it is instead."""
    try:
        record = json.loads(line) if len(line) <= MOST_BYTES else None
    except RecursionError:
        record = None
    if not isinstance(record, dict):
        raise ValueError("it is no mapping of names to numbers")
    step = record.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise ValueError("its step is not the number of a step")
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


class _Summary(_Record):
    finished: bool
    steps: _Step
    accuracy_before: _Number | None = None
    accuracy_after: _Number | None = None
    evaluations: list[_EvaluationRecord] = []
    wall_seconds: _Number | None = None
    tokens: dict[str, _Number | None] = {}


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run; empty where there is none, or what is there is no summary: resuming the run writes one."""
    try:
        summary = json.loads(read_bytes(path, MOST_BYTES))
        _Summary.model_validate(summary)
    except (OSError, ValueError, RecursionError, ValidationError):
        return {}
    assert isinstance(summary, dict)
    return summary
