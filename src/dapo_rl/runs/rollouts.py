"""The rollouts of a step as a Parquet table: one row for each sample, of kept and dropped groups alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_rl.base.files import beside
from dapo_rl.base.unicode import as_unicode
from dapo_rl.fates import Fate, Waiting
from dapo_rl.types import Group, ScoredSample, TrainedTokens


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group with what became of it."""

    group: Group
    fate: Fate | Waiting
    scores: Sequence[ScoredSample] | None = None
    """What the update saw, sample by sample; none for a group that was not trained on."""
    tokens: Sequence[TrainedTokens | None] | None = None
    """And token by token."""


SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("draw", pa.int64()),
        ("sample", pa.int32()),
        ("prompt_id", pa.string()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logps", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("version_first", pa.int64()),
        ("version_last", pa.int64()),
        ("answer", pa.string()),
        ("truth", pa.string()),
        ("score", pa.float64()),
        ("correct", pa.bool_()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("length_penalty", pa.float64()),
        ("advantage", pa.float64()),
        ("fate", pa.string()),
        ("train_logps", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
    ]
)


def write_table(path: Path, step: int, rows: Sequence[GroupRow]) -> None:
    records = [record for row in rows for record in _records(step, row)]
    table = pa.Table.from_pylist(records, schema=SCHEMA)
    with beside(path) as draft:
        pq.write_table(table, draft, compression="zstd")


def _records(step: int, row: GroupRow) -> Iterator[dict[str, Any]]:
    group = row.group
    scores: Sequence[ScoredSample | None] = row.scores if row.scores is not None else [None] * len(group.samples)
    seen = row.tokens if row.tokens is not None else [None] * len(group.samples)
    samples = zip(group.samples, group.verdicts, scores, seen, strict=True)
    for index, (sample, verdict, scored, tokens) in enumerate(samples):
        yield {
            "step": step,
            "draw": group.draw,
            "sample": index,
            "prompt_id": as_unicode(group.prompt.id),
            "data_source": as_unicode(group.prompt.data_source),
            "prompt": as_unicode(group.prompt.text),
            "response": as_unicode(sample.text),
            "token_ids": sample.token_ids,
            "logps": sample.logps,
            "finish_reason": sample.finish_reason,
            "version_first": sample.versions[0],
            "version_last": sample.versions[1],
            "answer": as_unicode(verdict.answer),
            "truth": as_unicode(group.prompt.answer),
            "score": verdict.score,
            "correct": verdict.correct,
            "status": verdict.status,
            "reward": scored.reward if scored else None,
            "length_penalty": scored.length_penalty if scored else None,
            "advantage": scored.advantage if scored else None,
            "fate": row.fate,
            "train_logps": tokens.logps if tokens else None,
            "entropies": tokens.entropies if tokens else None,
        }
