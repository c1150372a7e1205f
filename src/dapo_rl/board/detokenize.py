"""The text of each token of a response, by the tokenizer in the run directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dapo_rl.board.run import BoardRun

EMBEDDED = Path(__file__).parents[1] / "models" / "tiny" / "tokenizer.json"
LARGEST = 128 << 20
WAIT = 8
"""Maximum tokens to join into a character; no character has more than half as many bytes."""


def tokenizer_of(run: BoardRun) -> Any | None:
    """The tokenizer of the run or of the embedded model; None if the run has not written a model yet."""
    for path in _candidates(run):
        try:
            stat = path.stat()
        except OSError:  # the checkpoint was replaced by a newer one
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
    except Exception:  # an invalid file may raise anything
        return None


def pieces(tokenizer: Any | None, ids: Sequence[int]) -> list[tuple[str, int]]:
    """The response as pieces of text with their numbers of tokens, more than one if tokens share a character. Without
    a tokenizer, the ids."""
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
        except Exception:  # bytes that are not text
            stuck = True
        if stuck:
            text = detokenized(tokenizer, list(ids[position + 1 - waiting : position + 1]))
            stream = DecodeStream(skip_special_tokens=False)
        if text is not None:
            result.append((text, waiting))
            waiting = 0
    return result


def detokenized(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens; without a tokenizer, the ids."""
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    except Exception:  # no tokenizer, or numbers that are not tokens
        return "".join(f"[{token}]" for token in ids)
