"""What each token of a response reads, by the tokenizer that lies in the run directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dapo_rl.board.run import BoardRun

EMBEDDED = Path(__file__).parents[1] / "models" / "tiny" / "tokenizer.json"
LARGEST = 128 << 20
WAIT = 8
"""Tokens that may wait for the rest of a character; no character has more bytes than half of that."""


def tokenizer_of(run: BoardRun) -> Any | None:
    """The run's own, or that of the embedded model; none where a run has written no model yet."""
    for path in _candidates(run):
        try:
            stat = path.stat()
        except OSError:  # a checkpoint that has made room for a newer one
            continue
        return _load(path, stat.st_mtime_ns) if stat.st_size <= LARGEST else None
    return None


def _candidates(run: BoardRun) -> Iterator[Path]:
    if path := run.file("model", "tokenizer.json"):
        yield path
    for checkpoint in sorted((run.path / "checkpoints").glob("step-*"), reverse=True):
        if path := run.file("checkpoints", checkpoint.name, "model", "tokenizer.json"):
            yield path
    if run.settings().get("model.name") == "tiny":
        yield EMBEDDED


@lru_cache(maxsize=4)
def _load(path: Path, _changed: int) -> Any | None:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # whatever the library makes of a file that is none
        return None


def pieces(tokenizer: Any | None, ids: Sequence[int]) -> list[tuple[str, int]]:
    """The response in pieces: a text and the number of tokens that it takes, more than one where they share a
    character. Without a tokenizer the ids themselves."""
    if tokenizer is None:
        return [(f"[{token}]", 1) for token in ids]
    from tokenizers.decoders import DecodeStream

    result: list[tuple[str, int]] = []
    stream, waiting = DecodeStream(skip_special_tokens=False), 0
    for position, token in enumerate(ids):
        waiting += 1
        try:
            text = stream.step(tokenizer, token)
            stuck = text is None and (waiting >= WAIT or position == len(ids) - 1)
        except Exception:  # bytes that are no text
            stuck = True
        if stuck:
            text = _decoded(tokenizer, list(ids[position + 1 - waiting : position + 1]))
            stream = DecodeStream(skip_special_tokens=False)
        if text is not None:
            result.append((text, waiting))
            waiting = 0
    return result


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    except Exception:  # numbers that are no tokens
        return "".join(f"[{token}]" for token in ids)
