"""An ablation in the list and on its page: its arms, their curves, the table, and its runs.

The arms come from plan.json, which is written first, and the numbers from ablation.json, which is written last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dapo_rl.base.format import counted
from dapo_rl.base.quote import cut
from dapo_rl.board.curves import plain_curve, smooth_curve
from dapo_rl.board.files import (
    UnreadableError,
    as_count,
    as_items,
    as_list,
    as_number,
    as_text,
    read_object,
)
from dapo_rl.board.reports import BoardReport, RunsByPath
from dapo_rl.board.run import ACCURACY, BoardRun, problem_line
from dapo_rl.config.recipe import flat
from dapo_rl.lab.ablate.plan import MOST_ARMS, MOST_BYTES, arms_by_part
from dapo_rl.lab.ablate.quantities import TABLE
from dapo_rl.lab.ablate.report import arm_heads
from dapo_rl.lab.ablate.statistics import INTERVAL
from dapo_rl.runs.metrics_log import MetricsLog

CURVES = (
    *(ACCURACY, "acc/mean", "actor/entropy"),
    *("response_length/mean", "response_length/clip_ratio", "reward/mean"),
)
MOST_SEEDS = 64
LONGEST_CELL = 40


@dataclass(frozen=True, slots=True)
class BoardArm:
    name: str
    label: str
    part: str
    directory: str
    compared_with: str | None
    changes: str
    paper: int | None
    result: Mapping[str, Any]
    """Its entry in ablation.json, whose values are not checked yet."""


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of plan.json or ablation.json."""

    title: str
    recipe: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int | None
    arms: tuple[BoardArm, ...]


class BoardAblation(BoardReport):
    kind = "ablation"
    picture_name = "ablation.png"
    files = ("plan.json", "ablation.json")

    def __init__(self, name: str, path: Path, real: str) -> None:
        super().__init__(name, path, real)
        self._plan = self._remembered("plan.json", _read)
        self._results = self._remembered("ablation.json", _read)
        self._logs: dict[str, MetricsLog] = {}

    def row_of(self, runs: RunsByPath) -> dict[str, Any]:
        content = self._content()
        done, total = self._progress(content, runs)
        means = {
            arm.label: mean
            for arm in content.arms
            if (mean := as_number(_estimate(arm, "accuracy").get("mean"))) is not None
        }
        best = max(means, key=means.__getitem__) if means else None
        return {
            "state": self._state(content, done, total),
            "step": done,
            "steps": total,
            "accuracy": means[best] if best else None,
            "best": best,
            "what": f"{counted(len(content.arms), 'arm')}, {counted(len(content.seeds), 'seed')}: {content.recipe}",
            "started": self._newest(content, runs),
            "error": self._first_failure(content),
            "problem": self._problem(),
        }

    def page(self, runs: RunsByPath) -> dict[str, Any]:
        content = self._content()
        done, total = self._progress(content, runs)
        return {
            "name": self.name,
            "title": content.title,
            "recipe": content.recipe,
            "overrides": list(content.overrides),
            "seeds": list(content.seeds),
            "steps": content.steps,
            "state": self._state(content, done, total),
            "done": done,
            "total": total,
            "interval": INTERVAL,
            "picture": self.picture_version(),
            "problem": self._problem(),
            "arms": [
                {"name": arm.name, "label": arm.label, "changes": arm.changes, "compared_with": arm.compared_with}
                for arm in content.arms
            ],
            "parts": [
                {"part": part, "arms": [arm.name for arm in arms]} for part, arms in arms_by_part(content.arms).items()
            ],
            "table": _table(content.arms),
            "runs": self._runs(content, runs),
        }

    def curves(self, runs: RunsByPath, share: float, points: int) -> dict[str, Any]:
        """For each arm and metric, the mean over seeds and the range: steps, mean, low, high."""
        content = self._content()
        found = {}
        for arm in content.arms:
            own = [run for seed in content.seeds if (run := self._run(arm, seed, runs)) is not None]
            ended = [run for run in own if run.state == "finished"] or own
            logged = [(run, self._log(run)) for run in ended]
            found[arm.name] = {
                name: band([_values(run, log, name) for run, log in logged], 0.0 if name == ACCURACY else share, points)
                for name in CURVES
            }
        return found

    def _log(self, run: BoardRun) -> MetricsLog:
        """The few metrics of the page, since an ablation may have hundreds of runs."""
        log = self._logs.setdefault(run.real, MetricsLog(lambda: run.file("metrics.jsonl"), set(CURVES)))
        log.refresh()
        return log

    def _content(self) -> _Content:
        """The plan, with the results where there are any."""
        plan: _Content | None = self._plan.look()
        results: _Content | None = self._results.look()
        if plan is None or results is None:
            return plan or results or _Content(self.name, "", (), (), None, ())
        by_name = {arm.name: arm for arm in results.arms}
        arms = (replace(a, result=by_name[a.name].result) if a.name in by_name else a for a in plan.arms)
        return replace(plan, arms=tuple(arms))

    def _run(self, arm: BoardArm, seed: int, runs: RunsByPath) -> BoardRun | None:
        """Only runs that the board lists: a name from the file is compared, not opened."""
        return runs.get(os.path.join(self.real, arm.directory, f"seed-{seed}"))

    def _pairs(self, content: _Content, runs: RunsByPath) -> list[tuple[BoardArm, int, BoardRun | None]]:
        """Every arm that has separate runs, with each seed. Arms with equal settings share their runs."""
        own = [arm for arm in content.arms if arm.directory == arm.name]
        return [(arm, seed, self._run(arm, seed, runs)) for arm in own for seed in content.seeds]

    def _progress(self, content: _Content, runs: RunsByPath) -> tuple[int, int]:
        states = [_state_of(*pair) for pair in self._pairs(content, runs)]
        return sum(state in ("done", "finished") for state in states), len(states)

    def _newest(self, content: _Content, runs: RunsByPath) -> float | None:
        """When its newest run or file was started or written, so that it stands above its runs."""
        dates = [self._started(), *(run.started for _, _, run in self._pairs(content, runs) if run is not None)]
        return max((date for date in dates if date is not None), default=None)

    def _state(self, content: _Content, done: int, total: int) -> str:
        if self.is_written:
            return "running"
        if total and done == total:
            return "finished"
        return "failed" if self._first_failure(content) else "stopped"

    def _first_failure(self, content: _Content) -> str | None:
        for arm, seed, _ in self._pairs(content, {}):
            entry = _entry(arm, seed)
            if entry.get("state") == "failed":
                return problem_line(f"{arm.label}, seed {seed}: {as_text(entry.get('message')) or 'failed'}")
        return None

    def _runs(self, content: _Content, runs: RunsByPath) -> list[dict[str, Any]]:
        columns = {"accuracy_before": TABLE["accuracy"]} | TABLE
        return [
            {
                "arm": arm.label,
                "seed": seed,
                "run": run.name if run else None,
                "state": _state_of(arm, seed, run),
                "message": as_text(_entry(arm, seed).get("message")) or None,
                "cells": [_cell(column.write, _entry(arm, seed).get(name)) for name, column in columns.items()],
            }
            for arm, seed, run in self._pairs(content, runs)
        ]

    def _problem(self) -> str | None:
        found = {"plan.json": self._plan.problem, "ablation.json": self._results.problem}
        return problem_line("; ".join(f"{name}: {why}" for name, why in found.items() if why)) or None


def band(runs: Sequence[Mapping[float, float]], share: float, points: int) -> dict[str, Any]:
    """A metric of an arm's runs at the steps that all of them have: the mean, and the range over seeds."""
    measured = [values for values in runs if values]
    steps = np.array(sorted(set.intersection(*(set(values) for values in measured)))) if measured else np.empty(0)
    if not len(steps):
        return {"steps": [], "mean": [], "low": [], "high": [], "seeds": 0}
    with np.errstate(over="ignore", invalid="ignore"):  # sums of values that no run would write
        smoothed = [
            smooth_curve(steps, np.array([values[step] for step in steps]), share, points) for values in measured
        ]
        at, rows = smoothed[0][0], np.array([values for _, values in smoothed])
        mean, low, high = (plain_curve(at, line) for line in (rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)))
    return {"steps": mean[0], "mean": mean[1], "low": low[1], "high": high[1], "seeds": len(rows)}


def _values(run: BoardRun, log: MetricsLog, metric: str) -> dict[float, float]:
    if metric == ACCURACY:
        return {float(step): value for step, value in run.evaluations(log).items()}
    return dict(zip(*(column.tolist() for column in log.column(metric)), strict=True))


def _read(path: str) -> _Content:
    found = read_object(path, MOST_BYTES)
    listed, seeds = found.get("arms"), found.get("seeds")
    if not isinstance(listed, list) or not listed or not all(isinstance(arm, dict) for arm in listed):
        raise UnreadableError("has no arms")
    if not isinstance(seeds, list) or not seeds or not all(as_count(seed, 2**63) is not None for seed in seeds):
        raise UnreadableError("has no seeds")
    if len(listed) > MOST_ARMS or len(seeds) > MOST_SEEDS:
        raise UnreadableError(f"too large to show: {len(listed)} arms, {len(seeds)} seeds")
    words = [as_text(word) for word in as_list(found.get("overrides"), 100)]
    return _Content(
        title=as_text(found.get("name")) or "",
        recipe=as_text(found.get("recipe")) or "",
        overrides=tuple(word for word in words if word),
        seeds=tuple(seeds),
        steps=_steps(listed),
        arms=tuple(_arm(arm) for arm in listed),
    )


def _arm(found: Mapping[str, Any]) -> BoardArm:
    name = as_text(found.get("name"))
    if not name:
        raise UnreadableError("an arm has no name")
    words = [f"{key}={json.dumps(value)}" for key, value in as_items(found.get("changes"), 100)]
    paper = found.get("paper", found.get("paper_aime24"))
    return BoardArm(
        name=name,
        label=as_text(found.get("label")) or name,
        part=as_text(found.get("part")) or "",
        directory=as_text(found.get("directory")) or name,
        compared_with=as_text(found.get("compared_with")),
        changes=cut(", ".join(words).replace('"', ""), 300),
        paper=as_count(paper, 10_000),
        result=found if "runs" in found else {},
    )


def _steps(arms: Sequence[Mapping[str, Any]]) -> int | None:
    """The steps of every run; None if they differ, or are not known."""
    settings = [arm.get("settings") for arm in arms]
    found = {as_count(flat(own).get("train.steps")) if isinstance(own, dict) else None for own in settings}
    return found.pop() if len(found) == 1 else None


def _table(arms: Sequence[BoardArm]) -> dict[str, Any] | None:
    """The table of the report: means over seeds, with the intervals of accuracy and of the difference, or their ranges
    over few seeds. Those of other quantities are in the tooltips."""
    if not any(arm.result for arm in arms):
        return None
    from_paper = any(arm.paper is not None for arm in arms)
    return {"heads": arm_heads(from_paper), "rows": [_table_row(arm, arms, from_paper) for arm in arms]}


def _table_row(arm: BoardArm, arms: Sequence[BoardArm], from_paper: bool) -> list[dict[str, str]]:
    accuracy, *others = TABLE
    cells = [(arm.label, arm.changes)]
    if from_paper:
        cells.append(("" if arm.paper is None else str(arm.paper), ""))
    cells += [(_interval(arm, accuracy), ""), (_interval(arm, "difference"), _against(arm, arms))]
    cells += [(_cell(TABLE[name].write, _estimate(arm, name).get("mean")), _interval(arm, name)) for name in others]
    measured = as_count(_estimate(arm, accuracy).get("n")) or 0
    cells.append((f"{measured}/{len(_entries(arm))}", ""))
    return [{"text": text, "title": title} for text, title in cells]


def _against(arm: BoardArm, arms: Sequence[BoardArm]) -> str:
    other = next((each.label for each in arms if each.name == arm.compared_with), None)
    return f"in points, paired by seed, from {other}" if other else ""


def _interval(arm: BoardArm, name: str) -> str:
    found = _estimate(arm, name)
    write = (lambda share: f"{100 * share:+.1f}") if name == "difference" else TABLE[name].write
    mean, half, low, high, n = (as_number(found.get(part)) for part in ("mean", "half_width", "low", "high", "n"))
    text = _cell(write, mean)
    if mean is not None and half is not None:
        return f"{text} ± {_cell(TABLE['accuracy' if name == 'difference' else name].write, half)}"
    if mean is None or low is None or high is None or n == 1:
        return text
    ends = [_cell(write, end) for end in (low, high)]
    return f"{text} ({'all equal' if ends[0] == ends[1] else ' to '.join(ends)})"


def _estimate(arm: BoardArm, name: str) -> Mapping[str, Any]:
    found = arm.result.get(name)
    return found if isinstance(found, dict) else {}


def _cell(write: Any, value: Any) -> str:
    number = as_number(value)
    return "–" if number is None else cut(str(write(number)), LONGEST_CELL)


def _entries(arm: BoardArm) -> list[Any]:
    listed = arm.result.get("runs")
    return listed if isinstance(listed, list) else []


def _entry(arm: BoardArm, seed: int) -> Mapping[str, Any]:
    return next((entry for entry in _entries(arm) if isinstance(entry, dict) and entry.get("seed") == seed), {})


def _state_of(arm: BoardArm, seed: int, run: BoardRun | None) -> str:
    """The state of the run, or the state in ablation.json if the run is not here; `waiting` before it starts."""
    said = as_text(_entry(arm, seed).get("state"))
    if run is None:
        return said or "waiting"
    return "failed" if said == "failed" and run.state == "stopped" else run.state
