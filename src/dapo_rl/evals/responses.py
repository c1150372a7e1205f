"""The responses of an evaluation in a Parquet file, written in parts of whole problems so that a stop loses little."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_rl.base.files import beside, remove_leftovers
from dapo_rl.base.parquet import read_columns
from dapo_rl.base.unicode import as_unicode
from dapo_rl.codec import messages_json
from dapo_rl.types import Group

SAMPLES_PER_PART = 128

SCHEMA = pa.schema(
    [
        ("problem", pa.int64()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("answer", pa.string()),
        ("vote", pa.string()),
        ("truth", pa.string()),
        ("score", pa.float64()),
        ("correct", pa.bool_()),
        ("status", pa.string()),
        ("detail", pa.string()),
        ("turns", pa.int32()),
        ("messages", pa.string()),
    ]
)
"""`tokens` are those of the policy. `turns` and `messages`, the conversation after the prompt as JSON, are of episodes
with an environment."""


JudgedGroup = tuple[Group, Sequence[str | None]]
"""A problem's responses and verdicts, and their votes; the draw of the group is the problem's index."""


class ResponseFile:
    """`responses.parquet` in a directory, and its parts until it is complete."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "responses.parquet"
        self._parts = directory / "parts"

    @property
    def whole(self) -> bool:
        return self.path.exists()

    def begin(self, problems: int, k: int) -> list[range]:
        """The missing parts, each as a range of problems. A part that cannot be read counts as missing."""
        self._parts.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._parts)
        return [part for part in _split(problems, k) if _rows(self._part(part)) != len(part) * k]

    def write(self, part: range, problems: Sequence[JudgedGroup]) -> None:
        records = [record for group, votes in problems for record in _records(group, votes)]
        with beside(self._part(part)) as draft:
            pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), draft, compression="zstd")

    def finish(self, problems: int, k: int) -> None:
        """Joins all parts into one file."""
        with beside(self.path) as draft, pq.ParquetWriter(draft, SCHEMA, compression="zstd") as writer:
            for part in _split(problems, k):
                writer.write_table(read_columns(self._part(part), SCHEMA.names).cast(SCHEMA))
        self.tidy()

    def tidy(self) -> None:
        if self._parts.exists():
            shutil.rmtree(self._parts)

    def read(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        return read_columns(self.path, columns).to_pylist()  # type: ignore[no-any-return]

    def _part(self, part: range) -> Path:
        return self._parts / f"{part.start:08d}.parquet"


def _split(problems: int, k: int) -> list[range]:
    size = max(1, SAMPLES_PER_PART // k)
    return [range(start, min(start + size, problems)) for start in range(0, problems, size)]


def _rows(path: Path) -> int | None:
    try:
        file = pq.ParquetFile(path)
        return int(file.metadata.num_rows) if file.schema_arrow.names == SCHEMA.names else None
    except (OSError, pa.ArrowException):
        return None


def _records(group: Group, votes: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    for number, (sample, verdict, vote) in enumerate(zip(group.samples, group.verdicts, votes, strict=True)):
        yield {
            "problem": group.draw,
            "prompt_id": as_unicode(prompt.id),
            "sample": number,
            "data_source": as_unicode(prompt.data_source),
            "prompt": as_unicode(prompt.text),
            "response": as_unicode(sample.text),
            "token_ids": sample.token_ids,
            "tokens": group.lengths[number],
            "finish_reason": sample.finish_reason,
            "answer": as_unicode(verdict.answer),
            "vote": as_unicode(vote),
            "truth": as_unicode(prompt.answer),
            "score": verdict.score,
            "correct": verdict.correct,
            "status": verdict.status,
            "detail": as_unicode(verdict.detail),
            "turns": int(sample.scalars["turns"]) if "turns" in sample.scalars else None,
            "messages": as_unicode(messages_json(sample.messages)),
        }
