"""Reads the groups of a step from its Parquet file: the list, one group with its tokens, and search."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dapo_rl.board.files import UnreadableError
from dapo_rl.board.run import BoardRun
from dapo_rl.board.table import read_table
from dapo_rl.board.tokens import pieces, tokenizer_of

__all__ = ["UnreadableError", "group_of", "groups_of", "search", "tokens_by_fate"]

OF_A_GROUP = ("draw", "prompt_id", "data_source", "truth", "fate")
OF_A_VERDICT = ("correct", "status", "score", "reward", "advantage")
OF_A_SAMPLE = (
    *("sample", "answer", *OF_A_VERDICT, "length_penalty"),
    *("finish_reason", "version_first", "version_last"),
)
OF_A_TOKEN = ("logps", "train_logps", "entropies", "clipped")
"""Columns with a value per token: at sampling, and in the last update. `clipped` names the bound: 0 none, 1 the upper,
2 the lower, 3 dual clip's; runs of older versions lack it."""
COLOURS = ("logp", "ratio", "clipped", "entropy")
PROMPT_SHOWN = 400
WORTH_CUTTING = 40
"""Text shared by all prompts of a step is omitted from the list if it has at least this many characters."""
EXCERPT = 60
HITS = 60
SEARCH_SECONDS = 1.5


def groups_of(path: Path) -> list[dict[str, Any]]:
    """Every group of a step, kept or dropped, with a short summary of each sample, without responses."""
    columns = [*OF_A_GROUP, *OF_A_VERDICT]
    table = read_table(path, [*columns, "prompt", "token_ids"])
    lengths = _lengths(table).to_pylist()
    prompts = own_parts([prompt or "" for prompt in table.column("prompt").to_pylist()])
    groups: dict[Any, dict[str, Any]] = {}
    for row, length, prompt in zip(table.select(columns).to_pylist(), lengths, prompts, strict=True):
        group = groups.setdefault(
            row["draw"],
            {
                **{key: row[key] for key in OF_A_GROUP},
                "prompt": prompt[:PROMPT_SHOWN],
                "tokens": 0,
                "samples": [],
            },
        )
        group["tokens"] += length or 0
        group["samples"].append({key: row[key] for key in OF_A_VERDICT})
    return list(groups.values())


def own_parts(prompts: list[str]) -> list[str]:
    """Removes the words that all prompts begin with and the lines that all of them end with."""
    if len(set(prompts)) < 2:
        return prompts
    head = 1 + max((i for i, c in enumerate(_shared_start(prompts)) if c.isspace()), default=-1)
    tail = _shared_start([prompt[head:][::-1] for prompt in prompts]).rfind("\n") + 1
    if head + tail < WORTH_CUTTING:
        return prompts
    return [f"… {prompt[head : len(prompt) - tail]}" for prompt in prompts]


def _shared_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _lengths(table: pa.Table) -> pa.ChunkedArray:
    return pc.list_value_length(table.column("token_ids"))


def group_of(run: BoardRun, path: Path, draw: int) -> dict[str, Any] | None:
    """One group with its responses, as text and as tokens."""
    table = read_table(path, [*OF_A_GROUP, *OF_A_SAMPLE, "prompt", "response", "token_ids", *OF_A_TOKEN], draw)
    rows = table.to_pylist()
    if not rows:
        return None
    tokenizer = tokenizer_of(run)
    samples = [_sample(row, tokenizer) for row in rows]
    return {
        **{key: rows[0][key] for key in (*OF_A_GROUP, "prompt")},
        "decoded": tokenizer is not None,
        "colours": [name for name in COLOURS if any(name in sample for sample in samples)],
        "samples": samples,
    }


def _sample(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    ids = [token or 0 for token in row["token_ids"] or []]
    cut = pieces(tokenizer, ids)
    counts = [count for _, count in cut]
    sample = {**{key: row[key] for key in (*OF_A_SAMPLE, "response")}, "ids": ids, "pieces": [list(p) for p in cut]}
    if sampled := row["logps"]:
        sample["logp"] = _by_piece(sampled, counts, sum)
        if trained := row["train_logps"]:
            ratios = [_ratio(new, old) for new, old in zip(trained, sampled, strict=False)]
            sample["ratio"] = _by_piece(ratios, counts, lambda part: max(part, key=lambda r: abs(math.log(r))))
    if row["clipped"]:
        sample["clipped"] = _by_piece(row["clipped"], counts, max)
    if row["entropies"]:
        sample["entropy"] = _by_piece(row["entropies"], counts, max)
    return sample


def _ratio(new: float | None, old: float | None) -> float | None:
    if new is None or old is None or not math.isfinite(new - old):
        return None
    return math.exp(max(-50.0, min(50.0, new - old)))


def _by_piece(
    values: Sequence[float | None], counts: Sequence[int], together: Callable[[list[float]], float]
) -> list[float | None]:
    """A number per piece; `together` combines those of a piece with several tokens."""
    result: list[float | None] = []
    start = 0
    for count in counts:
        part = [float(v) for v in values[start : start + count] if v is not None and math.isfinite(v)]
        start += count
        result.append(float(f"{together(part):.5g}") if part else None)
    return result


def search(run: BoardRun, query: str, steps: Sequence[int]) -> dict[str, Any]:
    """Samples whose prompt or response contains the query, newest step first, up to a number of hits or a time limit.

    `next` is the step to continue from, `left` the number of steps that remain; `cut` says that the searched steps
    have more hits.
    """
    deadline = time.monotonic() + SEARCH_SECONDS
    hits: list[dict[str, Any]] = []
    order = sorted(steps, reverse=True)
    looked = 0
    for step in order:
        if looked and (len(hits) >= HITS or time.monotonic() > deadline):
            break
        looked += 1
        with suppress(UnreadableError):
            hits += _hits(path, step, query) if (path := run.rollout(step)) else []
    left = order[looked:]
    return {"hits": hits[:HITS], "cut": len(hits) > HITS, "left": len(left), "next": left[0] if left else None}


def _hits(path: Path, step: int, query: str) -> list[dict[str, Any]]:
    table = read_table(path, ["draw", "sample", "correct", "fate", "prompt", "response"])
    found = []
    for column in ("prompt", "response"):
        part = table.filter(pc.match_substring(table.column(column), query, ignore_case=True))
        for row in part.slice(0, 4 * HITS).to_pylist():
            if column == "prompt" and row["sample"]:
                continue  # samples of a group share their prompt
            place = max(row[column].lower().find(query.lower()), 0)
            excerpt = row[column][max(0, place - EXCERPT) : place + len(query) + EXCERPT]
            found.append({k: row[k] for k in ("draw", "sample", "correct", "fate")} | {"step": step, "text": excerpt})
    return found


def tokens_by_fate(path: Path) -> dict[str, int]:
    """Where the tokens of a step's groups went."""
    table = read_table(path, ["fate", "token_ids"])
    counts: Counter[str] = Counter()
    for fate, length in zip(table.column("fate").to_pylist(), _lengths(table).to_pylist(), strict=True):
        counts[str(fate)] += length or 0
    return dict(counts)
