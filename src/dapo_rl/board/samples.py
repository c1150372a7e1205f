"""The samples of a step as a list: filtered, sorted, a page at a time."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Query

from dapo_rl.board.files import Identity, UnreadableError, identity
from dapo_rl.board.rollout_table import read_table
from dapo_rl.types import VerdictStatus

Order = Literal["draw", "reward", "length", "verdict", "advantage", "turns"]
IN_LIST = (
    *("draw", "sample", "fate", "status", "correct", "score", "reward", "advantage", "finish_reason", "answer"),
    *("tools", "tool_calls", "tool_errors"),
)
TEXTS = ("prompt", "response", "answer", "truth", "messages")
OPENING = 160
"""Characters of an answer and of a response in the list."""
LENGTH = ("token_ids", "forked")
"""What `lengths_of` reads."""
NOT_JUDGED = "not judged"
"""The verdict of a sample whose run failed first."""
MOST_TOOLS = 30
"""Tools to filter by: the most used ones. A policy may call tools that do not exist."""


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which samples of a step, and in which order, as in the query of a request. Empty tuples and None do not
    restrict."""

    outcomes: Annotated[tuple[str, ...], Query(max_length=64, alias="fate")] = ()
    verdicts: Annotated[tuple[str, ...], Query(max_length=64, alias="verdict")] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    min_turns: float | None = None
    max_turns: float | None = None
    tools: Annotated[tuple[str, ...], Query(max_length=64, alias="tool")] = ()
    tool_errors: bool = False
    """Only those with tool calls that failed."""
    words: Annotated[str, Query(max_length=200, alias="q")] = ""
    sort: Order = "draw"
    down: bool = False


def samples_of(path: Path, wanted: SampleFilter, first: int, limit: int) -> dict[str, Any]:
    """A page of the samples, with the number of matches and the values to filter by."""
    table, places = _chosen(path, wanted)
    rewards, lengths, turns = (pc.min_max(table.column(name)).as_py() for name in ("worth", "length", "turns"))
    tools = Counter(pc.list_flatten(table.column("tools")).drop_null().to_pylist())
    return {
        "total": table.num_rows,
        "matched": len(places),
        "rows": table.take(places.slice(first, limit)).drop_columns(["rank", "tools"]).to_pylist(),
        "outcomes": Counter(map(str, table.column("fate").to_pylist())),
        "verdicts": Counter(map(str, table.column("status").to_pylist())),
        "rewards": [rewards["min"], rewards["max"]],
        "lengths": [lengths["min"], lengths["max"]],
        "turns": [turns["min"], turns["max"]],
        "tools": dict(tools.most_common(MOST_TOOLS)),
        "tool_errors": pc.sum(pc.greater(table.column("tool_errors"), 0)).as_py() or 0,
    }


def rows_of(path: Path, wanted: SampleFilter, columns: tuple[str, ...]) -> pa.Table:
    """Whole rows of the samples, without their tokens but with the columns that the board does not know."""
    index, places = _chosen(path, wanted)
    table = read_texts(path, columns, others=True)
    if table.num_rows != index.num_rows:
        raise UnreadableError(f"{path.name}: was replaced just now")
    for name in ("fate", "length"):
        table = table.drop_columns([name]) if name in table.column_names else table
        table = table.append_column(name, index.column(name))
    return table.take(places)


def _chosen(path: Path, wanted: SampleFilter) -> tuple[pa.Table, pa.Array]:
    now = identity(str(path))
    table = _index(path, now)
    mask = pa.array([True] * table.num_rows)
    for name, values in (("fate", wanted.outcomes), ("status", wanted.verdicts)):
        if values:
            mask = pc.and_(mask, pc.is_in(table.column(name), pa.array(values, pa.string())))
    for name, low, high in (
        ("worth", wanted.min_reward, wanted.max_reward),
        ("length", wanted.min_length, wanted.max_length),
        ("turns", wanted.min_turns, wanted.max_turns),
    ):
        if low is not None:
            mask = pc.and_(mask, pc.fill_null(pc.greater_equal(table.column(name), low), False))
        if high is not None:
            mask = pc.and_(mask, pc.fill_null(pc.less_equal(table.column(name), high), False))
    if wanted.tools:
        mask = pc.and_(mask, _with_tools(table, wanted.tools))
    if wanted.tool_errors:
        mask = pc.and_(mask, pc.fill_null(pc.greater(table.column("tool_errors"), 0), False))
    if wanted.words:
        mask = pc.and_(mask, _with_words(path, now, wanted.words))
    key = {"reward": "worth", "verdict": "rank"}.get(wanted.sort, wanted.sort)
    direction = "descending" if wanted.down else "ascending"
    ties = [(name, "ascending") for name in ("draw", "sample") if name != key]
    order = pc.sort_indices(table, sort_keys=[(key, direction), *ties])  # nulls last
    return table, order.filter(pc.take(mask, order))


@lru_cache(maxsize=8)
def _index(path: Path, _now: Identity | None) -> pa.Table:
    """The columns of the list. Cached, since computing lengths reads the tokens of the whole step."""
    table = read_table(path, [*IN_LIST, "response", *LENGTH, "policy_turns"])
    found = {name: table.column(name) for name in IN_LIST}
    found["fate"] = outcomes_shown(table)
    found["length"] = lengths_of(table)
    found["status"] = pc.fill_null(table.column("status"), NOT_JUDGED)
    # A sample that was not trained on has a score, but no length penalty and no reward.
    found["worth"] = pc.coalesce(table.column("reward"), table.column("score"))
    found["turns"] = pc.fill_null(table.column("policy_turns"), 1)
    found["rank"] = pc.index_in(table.column("status"), pa.array(get_args(VerdictStatus)))
    found["answer"] = pc.utf8_slice_codeunits(table.column("answer"), 0, OPENING)
    found["opening"] = pc.utf8_slice_codeunits(table.column("response"), 0, OPENING)
    return pa.table(found).combine_chunks()


def _with_tools(table: pa.Table, names: tuple[str, ...]) -> pa.Array:
    tools = table.column("tools").combine_chunks()
    called = pc.fill_null(pc.is_in(pc.list_flatten(tools), pa.array(names, pa.string())), False)
    rows = pc.list_parent_indices(tools).filter(called)
    return pc.is_in(pa.array(range(table.num_rows), pa.int64()), rows)


@lru_cache(maxsize=32)
def _with_words(path: Path, _now: Identity | None, words: str) -> pa.ChunkedArray:
    table = read_texts(path, TEXTS)
    mask = matches(table, TEXTS[0], words)
    for name in TEXTS[1:]:
        mask = pc.or_(mask, matches(table, name, words))
    return mask


def matches(table: pa.Table, column: str, words: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.match_substring(table.column(column), _written(column, words), ignore_case=True), False)


def pattern_of(column: str, words: str) -> re.Pattern[str]:
    return re.compile(re.escape(_written(column, words)), re.IGNORECASE)


def _written(column: str, words: str) -> str:
    """The words as they stand in a column: messages are JSON."""
    return json.dumps(words, ensure_ascii=False)[1:-1] if column == "messages" else words


def read_texts(path: Path, columns: Sequence[str], *, others: bool = False) -> pa.Table:
    """Columns of all groups. `messages` has those of all trajectories of an episode."""
    table = read_table(path, [*columns, "forked"], others=others)
    of_row: defaultdict[int, list[str]] = defaultdict(list)
    for row, text in zip(*(values.to_pylist() for values in _forked(table, "messages")), strict=True):
        of_row[row].append(text)
    if of_row:
        own = table.column("messages").to_pylist()
        whole = [_one_list([*of_row[row], text]) if row in of_row else text for row, text in enumerate(own)]
        table = table.set_column(table.column_names.index("messages"), "messages", pa.array(whole, pa.string()))
    return table.drop_columns(["forked"])


def _one_list(texts: Iterable[str | None]) -> str:
    """JSON lists as one; none of them need be valid."""
    return f"[{', '.join(text[1:-1] for text in texts if text)}]"


def lengths_of(table: pa.Table) -> pa.Array:
    """The tokens of each row, in all trajectories of an episode."""
    lengths = pc.fill_null(pc.list_value_length(table.column("token_ids")), 0).to_numpy().astype(np.int64)
    rows, ids = _forked(table, "token_ids")
    np.add.at(lengths, rows.to_numpy(), pc.fill_null(pc.list_value_length(ids), 0).to_numpy())
    return pa.array(lengths)


def _forked(table: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column of the forks, and the row of each."""
    forked = table.column("forked").combine_chunks()
    return pc.list_parent_indices(forked), pc.struct_field(pc.list_flatten(forked), name)


def outcomes_shown(table: pa.Table) -> pa.ChunkedArray:
    """The outcome of each sample's group; a group that was trained on with advantages of 0 is `filled`."""
    draws, outcomes = table.column("draw"), table.column("fate")
    signal = pc.fill_null(pc.not_equal(table.column("advantage"), 0), True)
    with_signal = pc.is_in(draws, pc.unique(draws.filter(signal)))
    return pc.if_else(
        pc.and_(pc.fill_null(pc.equal(outcomes, "kept"), False), pc.invert(with_signal)), "filled", outcomes
    )
