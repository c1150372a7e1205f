"""Where the generated tokens went: in total and per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dapo_rl.board.contents import LARGEST_COUNT, as_count
from dapo_rl.board.files import UnreadableError, identity
from dapo_rl.board.groups import tokens_by_fate
from dapo_rl.board.run import BoardRun

BARS = 160


def ledger(run: BoardRun) -> dict[str, Any]:
    totals, whole = _totals(run)
    bars, steps = _bars(run)
    return {"totals": totals, "final": whole, "bars": bars, "steps": steps}


def _totals(run: BoardRun) -> tuple[dict[str, int], bool]:
    """The totals of a finished run, or those of the log until then, which distinguishes fewer fates."""
    own = run.summary().get("tokens")
    if run.state != "running" and isinstance(own, dict):
        return {fate: tokens for fate, tokens in own.items() if as_count(tokens, LARGEST_COUNT) is not None}, True
    run.log.refresh()
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
    chosen = sorted({*steps[::stride], *steps[-1:]})
    bars = []
    for step in chosen:
        path = run.rollout(step)
        if path is None:
            continue
        key, now = ("ledger", step), identity(str(path))
        known = run.cache.get(key)
        if known is None or known[0] != now:
            known = run.cache[key] = now, _tokens(path)
        if known[1] is not None:
            bars.append({"step": step, "tokens": known[1]})
    return bars, len(steps)


def _tokens(path: Path) -> dict[str, int] | None:
    try:
        return tokens_by_fate(path)
    except UnreadableError:
        return None


def _whole(value: float) -> int:
    """A number of tokens, bounded: a log that was tampered with can add up to anything."""
    return round(value) if 0 <= value <= LARGEST_COUNT else 0
