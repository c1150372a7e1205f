"""Downloads as CSV and JSON Lines: rows of samples, and curves."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi.responses import StreamingResponse

from dapo_rl.board.conversations import OF_AN_EPISODE
from dapo_rl.board.curves import smooth_curve
from dapo_rl.board.rollout_table import extras_of
from dapo_rl.board.run import ACCURACY, BoardRun
from dapo_rl.board.watcher import dumps

COLUMNS = (
    *("step", "draw", "sample", "prompt_id", "data_source", "fate", "status", "correct", "score", "reward"),
    *("length_penalty", "advantage", "length", "finish_reason", "version_first", "version_last", "answer", "truth"),
    *OF_AN_EPISODE,
    *("prompt", "response", "messages"),
)
AT_ONCE = 256
"""Rows that are in memory as text at a time."""
FORMULA = re.compile(r"\s*[=+\-@\t\r\n]")
"""How a cell begins that a spreadsheet may evaluate."""


def attached(content: Iterator[str], name: str) -> StreamingResponse:
    kind = "text/csv" if name.endswith(".csv") else "application/x-ndjson"
    disposition = f'attachment; filename="{file_name(name)}"'
    return StreamingResponse(content, media_type=f"{kind}; charset=utf-8", headers={"Content-Disposition": disposition})


def file_name(name: str) -> str:
    """A name that is safe in a header and in any file system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-150:] or "download"


def curve_points(run: BoardRun, metric: str, share: float, first: float, last: float) -> Iterator[tuple[Any, ...]]:
    steps, values = run.log.column(metric, first, last)
    if metric == ACCURACY and first <= 0 and (not len(steps) or steps[0] > 0) and 0 in (known := run.evaluations()):
        yield run.name, metric, 0, known[0], known[0]
    _, smooth = smooth_curve(steps, values, share, len(steps))
    for step, value, smoothed in zip(steps.tolist(), values.tolist(), smooth.tolist(), strict=True):
        yield run.name, metric, int(step), value, smoothed


def rows_csv(table: Any) -> Iterator[str]:
    """A line per sample. Unknown columns come last."""
    others = [name for name in table.column_names if name not in COLUMNS]
    extras = extras_of(table, others)
    names = list(dict.fromkeys(key for extra in extras for key in extra))
    lines = (
        [*(row[column] for column in COLUMNS), *(extra.get(key) for key in names)]
        for row, extra in zip(_rows(table.select(COLUMNS)), extras, strict=True)
    )
    return csv_text((*COLUMNS, *names), lines)


def rows_jsonl(table: Any) -> Iterator[str]:
    others = [name for name in table.column_names if name not in COLUMNS]
    for row, extra in zip(_rows(table.select(COLUMNS)), extras_of(table, others), strict=True):
        yield dumps(row | ({"extra": extra} if extra else {})) + "\n"


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for start in range(0, table.num_rows, AT_ONCE):
        yield from table.slice(start, AT_ONCE).to_pylist()


def csv_text(header: Iterable[str], lines: Iterable[Iterable[Any]]) -> Iterator[str]:
    """CSV in pieces; a text that a spreadsheet would evaluate as a formula begins with an apostrophe."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([safe_cell(name) for name in header])
    for count, line in enumerate(lines, 1):
        writer.writerow([safe_cell(value) for value in line])
        if count % AT_ONCE == 0:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def safe_cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value
