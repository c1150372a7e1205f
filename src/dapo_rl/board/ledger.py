"""Where the generated tokens went: in total and per step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dapo_rl.board.files import LARGEST_COUNT, UnreadableError, as_count, identity
from dapo_rl.board.rollout_table import read_table
from dapo_rl.board.run import BoardRun
from dapo_rl.board.samples import LENGTH, lengths_of

BARS = 160


def ledger(run: BoardRun) -> dict[str, Any]:
    run.log.refresh()
    totals, whole = _totals(run)
    bars, steps = _bars(run)
    return {"totals": totals, "final": whole, "bars": bars, "steps": steps, "last_step": run.log.last_step}


def _totals(run: BoardRun) -> tuple[dict[str, int], bool]:
    """The totals of a finished run, or those of the log until then, which distinguishes fewer outcomes."""
    own = run.results(run.log.last_step).get("tokens")
    if isinstance(own, dict):
        return {outcome: tokens for outcome, tokens in own.items() if as_count(tokens, LARGEST_COUNT) is not None}, True
    generated, trained = (_whole(run.log.total(f"sampling/tokens_{name}")) for name in ("generated", "trained"))
    steps, shares = (column.tolist() for column in run.log.column("sampling/wasted_share"))
    of_step = dict(zip(*(column.tolist() for column in run.log.column("sampling/tokens_generated")), strict=True))
    dropped = _whole(sum(share * of_step.get(step, 0.0) for step, share in zip(steps, shares, strict=True)))
    waiting = max(0, generated - trained - dropped)
    return {"trained": trained, "dropped": dropped, "waiting": waiting, "total": generated}, False


def _bars(run: BoardRun) -> tuple[list[dict[str, Any]], int]:
    """A bar per step, or for evenly spaced steps if there are many."""
    steps = run.rollout_steps()
    stride = 1
    while len(steps) > BARS * stride:  # doubling keeps most bars of a growing run the same
        stride *= 2
    # Counted from step 1: where old files are deleted, those that are left are chosen as before.
    chosen = [step for place, step in enumerate(steps, steps[0] - 1 if steps else 0) if place % stride == 0]
    known, read = run.cache.get("ledger", {}), {}
    for step in dict.fromkeys([*chosen, *steps[-1:]]):
        if path := run.rollout(step):
            key = step, identity(str(path))
            read[key] = known[key] if key in known else _tokens(path)
    run.cache["ledger"] = read
    bars = [{"step": step, "tokens": tokens} for (step, _), tokens in read.items() if tokens is not None]
    return bars, len(steps)


def _tokens(path: Path) -> dict[str, int] | None:
    try:
        table = read_table(path, ["fate", *LENGTH])
    except UnreadableError:
        return None
    counts: Counter[str] = Counter()
    for outcome, length in zip(table.column("fate").to_pylist(), lengths_of(table).to_pylist(), strict=True):
        counts[str(outcome)] += length
    return dict(counts)


def _whole(value: float) -> int:
    """A number of tokens, bounded: a log that was tampered with can add up to anything."""
    return round(value) if 0 <= value <= LARGEST_COUNT else 0
