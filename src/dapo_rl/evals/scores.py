"""`dapo eval --scores`: the rows of a data set with the pass rates of a model, for `data.pass_rate`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.base.files import atomic_write, beside
from dapo_rl.base.home import expanded
from dapo_rl.base.quote import one_line
from dapo_rl.config.sources import Sources, entries_of
from dapo_rl.data import Rows
from dapo_rl.errors import UserError
from dapo_rl.evals.metrics import is_failed
from dapo_rl.evals.responses import ResponseFile

RATE, SAMPLES = "pass_rate", "pass_rate_samples"
SUFFIXES = (".jsonl", ".parquet")


def check_scores(path: Path, models: Sequence[str], data: Sources) -> None:
    """Raises a UserError for a file that could not be written, before anything is sampled."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--scores: {path}: unsupported format; name a file that ends in {' or '.join(SUFFIXES)}")
    if len(models) > 1:
        raise UserError(f"--scores: {len(models)} models, but a data set has one pass rate per row; name one model")
    if not path.parent.is_dir():
        raise UserError(f"--scores: {path}: there is no directory {path.parent}; create it, or name another file")
    if path.is_dir():
        raise UserError(f"--scores: {path} is a directory; name a file")
    files = [expanded(entry.source) for entry in entries_of(data)]
    if path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise UserError(f"--scores: {path} is the data itself; name another file")


def write_scores(path: Path, rows: Rows, responses: ResponseFile) -> int:
    """Writes each row that was sampled with its pass rate, null if no sample was judged, and the number of samples
    judged. Returns the number of rows."""
    scored = list(scored_rows(rows, responses.read(("prompt_id", "correct", "status"))))
    if path.suffix.lower() == ".parquet":
        _write_parquet(path, scored)
    else:
        _write_jsonl(path, scored)
    return len(scored)


def scored_rows(rows: Rows, samples: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    judged: dict[str, list[bool]] = {}
    for sample in samples:
        own = judged.setdefault(sample["prompt_id"], [])
        if not is_failed(sample):
            own.append(sample["correct"])
    for row in rows.good:
        if (right := judged.get(row.id)) is not None:
            yield row.columns | {RATE: sum(right) / len(right) if right else None, SAMPLES: len(right)}


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:  # bytes, dates
        raise UserError(f"--scores: {path}: {one_line(error)}; name a .parquet file, which can hold it") from None
    atomic_write(path, text)


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    columns, name = {}, ""
    try:
        for name in names:
            columns[name] = pa.array([row.get(name) for row in rows])
        with beside(path) as draft:
            pq.write_table(pa.table(columns), draft, compression="zstd")
    except (pa.ArrowException, OverflowError) as error:  # values of several types, a mapping without keys
        raise UserError(
            f"--scores: {path}: the column {name!r} cannot be written as Parquet: {one_line(error)}; name a .jsonl file"
        ) from None
