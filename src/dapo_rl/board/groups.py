"""Reads the groups of a step from its Parquet file: the list, one group with its tokens, and search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dapo_rl.board.conversations import OF_AN_EPISODE, prompt_of, turns_of
from dapo_rl.board.detokenize import tokenizer_of
from dapo_rl.board.files import UnreadableError
from dapo_rl.board.rollout_table import extras_of, read_table
from dapo_rl.board.run import BoardRun
from dapo_rl.board.samples import LENGTH, TEXTS, lengths_of, matches, outcomes_shown, pattern_of, read_texts

OF_A_GROUP = ("draw", "prompt_id", "data_source", "truth", "fate")
OF_A_VERDICT = ("correct", "status", "score", "reward", "advantage")
OF_A_SAMPLE = (
    *("sample", "answer", *OF_A_VERDICT, "length_penalty"),
    *("finish_reason", "version_first", "version_last"),
)
OF_A_TOKEN = ("logps", "train_logps", "entropies", "clipped", "values", "advantages")
"""Columns with a value per token: at sampling, in the last update, and from a critic. `clipped` names the bound: 0
none, 1 the upper, 2 the lower, 3 dual clip's. Runs of older versions lack some of them."""
COLOURS = ("logp", "ratio", "clipped", "entropy", "value")
BY_PIECE: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "logp": ("logps", sum),
    "clipped": ("clipped", max),
    "entropy": ("entropies", max),
    "value": ("values", lambda part: part[0]),  # before the piece
    "advantages": ("advantages", lambda part: max(part, key=abs)),
}
"""The column of each figure, and how those of a piece with several tokens become one."""
OF_A_TRAJECTORY = ("ids", "pieces", "turns", "ratio", *BY_PIECE)
PROMPT_SHOWN = 400
WORTH_CUTTING = 40
"""Text shared by all prompts of a step is omitted from the list if it has at least this many characters."""
MOST_TOKENS = 4_000_000
"""Tokens of a group, each of which becomes a part of the page."""
EXCERPT = 60
HITS = 60
MOST_COUNTED = 10_000
"""Occurrences in a text, from which on they are not counted."""
SEARCH_SECONDS = 1.5


def groups_of(path: Path) -> list[dict[str, Any]]:
    """Every group of a step, kept or dropped, with a short summary of each sample, without responses."""
    columns = [*OF_A_GROUP, *OF_A_VERDICT]
    table = _with_shown_outcomes(read_table(path, [*columns, "prompt", *LENGTH]))
    lengths = lengths_of(table).to_pylist()
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
        group["tokens"] += length
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


def _with_shown_outcomes(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("fate"), "fate", outcomes_shown(table))


def group_of(run: BoardRun, path: Path, draw: int) -> dict[str, Any] | None:
    columns = [*OF_A_GROUP, *OF_A_SAMPLE, "prompt", "response", *LENGTH, *OF_A_TOKEN]
    columns += ["prompt_ids", "messages", "turns", *OF_AN_EPISODE]
    table = _with_shown_outcomes(read_table(path, columns, draw, others=True))
    if (tokens := pc.sum(lengths_of(table)).as_py() or 0) > MOST_TOKENS:
        raise UnreadableError(f"{path.name}: too large to show: the group has {tokens:,} tokens")
    rows = table.select(columns).to_pylist()
    if not rows:
        return None
    tokenizer = tokenizer_of(run)
    extras = extras_of(table, [name for name in table.column_names if name not in columns])
    samples = [_sample(row, tokenizer) | {"extra": extra} for row, extra in zip(rows, extras, strict=True)]
    return {
        **{key: rows[0][key] for key in (*OF_A_GROUP, "prompt")},
        "decoded": tokenizer is not None,
        "colours": [name for name in COLOURS if any(name in sample for sample in samples)],
        "samples": samples,
    }


def _sample(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A sample. The trajectories of an episode that forked follow one another."""
    sample = {key: row[key] for key in (*OF_A_SAMPLE, "response")} | _trajectory(row, tokenizer)
    if forks := [fork for fork in row["forked"] or [] if fork]:
        own = {name: sample.pop(name) for name in OF_A_TRAJECTORY if name in sample}
        before = [_trajectory(fork, tokenizer) for fork in forks]
        prompts = [prompt_of(each, tokenizer) for each in (*forks, row)]
        sample |= _joined([*before, own], prompts)
    if "turns" in sample:
        sample |= {key: row[key] for key in OF_AN_EPISODE}
    return sample


def _joined(parts: Sequence[dict[str, Any]], prompts: Sequence[str]) -> dict[str, Any]:
    """Trajectories as one: `trajectories` says at which turn each begins, and with which prompt. A figure is None where
    a trajectory lacks it."""
    figures = [name for name in OF_A_TRAJECTORY if any(name in part for part in parts)]
    whole: dict[str, Any] = {name: [] for name in (*figures, "turns", "trajectories")}
    for part, prompt in zip(parts, prompts, strict=True):
        first, tokens = len(whole["pieces"]), len(part["ids"])
        last = len(part["pieces"])
        alone = {"author": "policy", "tokens": tokens, "seconds": None, "reward": None, "messages": []}
        turns = part.get("turns") or ([alone | {"first": 0, "last": last}] if tokens else [])
        if turns:
            whole["trajectories"].append({"turn": len(whole["turns"]), "tokens": tokens, "prompt": prompt})
        whole["turns"] += [turn | {"first": first + turn["first"], "last": first + turn["last"]} for turn in turns]
        for name in figures:
            if name != "turns":
                whole[name] += part.get(name, [None] * last)
    return whole


def _trajectory(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    ids = [token or 0 for token in row["token_ids"] or []]
    turns, cut = turns_of(row, tokenizer, ids)
    counts = [count for _, count in cut]
    sample: dict[str, Any] = {"ids": ids, "pieces": [list(piece) for piece in cut]}
    if turns:
        sample["turns"] = turns
    if (sampled := row["logps"]) and (trained := row["train_logps"]):
        ratios = [_ratio(new, old) for new, old in zip(trained, sampled, strict=False)]
        sample["ratio"] = _by_piece(ratios, counts, lambda part: max(part, key=lambda r: abs(math.log(r))))
    for name, (column, together) in BY_PIECE.items():
        if row[column]:
            sample[name] = _by_piece(row[column], counts, together)
    return sample


def _ratio(new: float | None, old: float | None) -> float | None:
    if new is None or old is None or not math.isfinite(new - old):
        return None
    return math.exp(max(-50.0, min(50.0, new - old)))


def _by_piece(
    values: Sequence[float | None], counts: Sequence[int], together: Callable[[list[float]], float]
) -> list[float | None]:
    result: list[float | None] = []
    start = 0
    for count in counts:
        part = [float(v) for v in values[start : start + count] if v is not None and math.isfinite(v)]
        start += count
        result.append(float(f"{together(part):.5g}") if part else None)
    return result


def search(run: BoardRun, query: str, steps: Sequence[int]) -> dict[str, Any]:
    """Samples whose prompt, response or answer contains the query, newest step first, within limits of hits and time.

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
    """Searches the prompt and the truth once per group, and the response, the answer and the messages of every
    sample."""
    table = _with_shown_outcomes(read_texts(path, ["sample", "correct", "advantage", "fate", *TEXTS]))
    first = pc.fill_null(pc.equal(table.column("sample"), 0), True)
    found = []
    for columns, of_group in ((("prompt", "truth"), True), (("response", "answer", "messages"), False)):
        mask = reduce(pc.or_, (matches(table, column, query) for column in columns))
        part = table.filter(pc.and_(mask, first) if of_group else mask)
        for row in part.slice(0, 4 * HITS).to_pylist():
            hits = {column: pattern_of(column, query).finditer(row[column] or "") for column in columns}
            spans = {column: [hit.span() for hit in islice(hits[column], MOST_COUNTED)] for column in columns}
            where = next((column for column in columns if spans[column]), columns[0])
            start, end = spans[where][0] if spans[where] else (0, 0)
            found.append(
                {key: row[key] for key in ("draw", "sample", "correct", "fate")}
                | {"step": step, "where": where, "count": len(spans[where])}
                | {"text": (row[where] or "")[max(0, start - EXCERPT) : end + EXCERPT]}
            )
    return found
