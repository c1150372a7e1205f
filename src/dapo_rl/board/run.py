"""A run directory: its settings, summary, log, state, and its row in the table.

The content of the directory is untrusted: what a run would not write is ignored, and the row says so in one line.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import cut, printable
from dapo_rl.board.files import (
    LARGEST_COUNT,
    LARGEST_SUMMARY,
    BoardDirectory,
    as_count,
    as_number,
    as_text,
    identity,
    is_inside,
    not_a_file,
    read_error,
    read_object,
    read_settings,
    wrong_in_summary,
)
from dapo_rl.objectives import GAE
from dapo_rl.runs.directory import rollout_name, rollout_step
from dapo_rl.runs.metrics_log import MetricsLog

LONGEST_PROBLEM = 200
WATCHED = ("config.yaml", "summary.json", "metrics.jsonl", "error.json", "rollouts")
RECENT = {
    "reward": "reward/mean",
    "correct": "acc/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
}
TOTALS = {"tokens": "sampling/tokens_generated", "seconds": "timing_s/step"}
ACCURACY = "eval/accuracy"
PROCESSES = {
    "engines": re.compile(r"engine/([0-9]{1,6})/(queue|version|tokens_per_s|busy|lost)"),
    "ranks": re.compile(r"rank/([0-9]{1,6})/(tokens|busy|memory_gib)"),
}
MOST_PROCESSES = 4096
AT_A_TIME = 32 << 20
"""Bytes of a log to read per refresh of the row, so that a long log does not delay the others."""


class BoardRun(BoardDirectory):
    def __init__(self, name: str, path: Path, real: str | None = None) -> None:
        super().__init__(name, path, real)
        self._settings = self._remembered("config.yaml", read_settings)
        self._summary = self._remembered("summary.json", lambda path: read_object(path, LARGEST_SUMMARY))
        self._error = self._remembered("error.json", read_error)
        self._rollouts: tuple[int, list[int]] = (-1, [])
        self._digest = MetricsLog(lambda: self.file("metrics.jsonl"), {*RECENT.values(), *TOTALS.values(), ACCURACY})
        self.cache: dict[Any, Any] = {}
        """A cache for other modules, which are responsible for invalidating their entries."""

    @cached_property
    def log(self) -> MetricsLog:
        """All metrics. The row has its own log with the few that it needs, since there can be thousands of rows."""
        return MetricsLog(lambda: self.file("metrics.jsonl"))

    def close_log(self) -> None:
        self.__dict__.pop("log", None)

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key."""
        read = self._settings.look()
        return dict(read[0]) if read else {}

    def summary(self) -> dict[str, Any]:
        return self._summary.look() or {}

    def error(self) -> dict[str, Any] | None:
        """Why the run failed; None if it did not, or was resumed since and finished."""
        found = self._error.look()
        if self.state != "failed":
            return None
        unknown = dict.fromkeys(("time", "step", "kind", "traceback"))
        return found or {**unknown, "message": f"error.json: {self._error.problem}"}

    def rollout_steps(self) -> list[int]:
        directory = self.at("rollouts")
        try:
            changed = os.stat(directory).st_mtime_ns
            if self._rollouts[0] != changed:
                names = os.listdir(directory) if is_inside(directory, self.real) else []
                self._rollouts = changed, sorted(step for name in names if (step := rollout_step(name)) is not None)
        except OSError:
            return []
        return self._rollouts[1]

    def _has_rollouts(self) -> bool:
        """Whether there are any, without listing them all."""
        directory = self.at("rollouts")
        try:
            if not is_inside(directory, self.real):
                return False
            with os.scandir(directory) as entries:
                return any(rollout_step(entry.name) is not None for entry in entries)
        except OSError:
            return False

    def rollout(self, step: int) -> Path | None:
        return self.file("rollouts", rollout_name(step))

    def written(self, step: int) -> str | None:
        """Another text when the groups of a step are written again; None if there are none."""
        path = self.rollout(step)
        return None if path is None else str(identity(str(path)))

    def why_no_rollout(self, step: int) -> str:
        keep, steps = as_count(self.settings().get("log.keep_rollouts")), self.rollout_steps()
        if keep and steps and step < steps[0]:
            return f"The groups of step {step} were deleted: log.keep_rollouts={keep} keeps those of the newest steps."
        return f"No groups were written at step {step}."

    def evaluations(self, log: MetricsLog | None = None) -> dict[int, float]:
        """Held-out accuracy by step; in older runs only the summary has the evaluation before the first step."""
        listed = self.summary().get("evaluations")
        found: dict[int, float] = {}
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict):
                step, accuracy = as_count(entry.get("step", 0)), as_number(entry.get("accuracy"))
                if step is not None and accuracy is not None:
                    found[step] = accuracy
        steps, values = (log or self.log).column(ACCURACY)
        return found | {int(step): float(value) for step, value in zip(steps, values, strict=True)}

    def processes(self, kind: str) -> list[dict[str, Any]]:
        """The latest figures of each engine or rank of a run on a cluster, by its number."""
        found: dict[int, dict[str, Any]] = {}
        for name in self.log.names:
            if (match := PROCESSES[kind].fullmatch(name)) and (len(found) < MOST_PROCESSES or int(match[1]) in found):
                row = found.setdefault(int(match[1]), {"number": int(match[1])})
                row[match[2]] = as_number(self.log.latest(name))
        return [found[number] for number in sorted(found)]

    @property
    def state(self) -> str:
        """`running`, `finished`, `failed` (it wrote why), or `stopped` (by a signal, or a crash of the machine)."""
        if self.is_written:
            return "running"
        summary, steps = self.summary(), as_count(self.settings().get("train.steps"))
        # A run that finished may have been resumed with more steps.
        if summary.get("finished") is True and (steps is None or summary.get("steps") in (None, steps)):
            return "finished"
        self._error.look()
        return "failed" if self._error.value or self._error.problem else "stopped"

    def results(self, last_step: int) -> dict[str, Any]:
        """The summary of a run that has ended; empty if its log has gone on to `last_step` since it was written."""
        summary = self.summary()
        is_old = last_step > (as_count(summary.get("steps", last_step)) or 0)
        return {} if is_old or self.state == "running" else summary

    def glance(self) -> tuple[Any, ...]:
        """A value that changes when the row does. It costs a `stat` of a few files, and opens only changed ones."""
        return (*(identity(self.at(name)) for name in WATCHED), self.is_written, self._lock.problem)

    @property
    def is_over(self) -> bool:
        """Whether nothing writes here any more, so that every change shows in the directory's identity."""
        return self.summary().get("finished") is True and not os.path.lexists(self.at(".lock"))

    def first_row(self) -> dict[str, Any]:
        return _EMPTY_ROW | {
            "name": self.name,
            "state": "reading",
            "started": self.started,
            "rollouts": os.path.isdir(self.at("rollouts")),
        }

    def row(self) -> dict[str, Any]:
        self._digest.refresh(AT_A_TIME)
        settings, evaluations = self.settings(), self.evaluations(self._digest)
        figures = {key: as_number(self._digest.latest(name, 10)) for key, name in RECENT.items()}
        figures |= {key: as_number(self._digest.total(name)) for key, name in TOTALS.items()}
        results = self.results(self._digest.last_step)
        tokens = results.get("tokens")
        if isinstance(tokens, dict) and (total := as_count(tokens.get("total"), LARGEST_COUNT)) is not None:
            figures["tokens"] = total  # with those of a step that the run did not finish
        if (seconds := as_number(results.get("wall_seconds"))) is not None:
            figures["seconds"] = seconds
        return _EMPTY_ROW | {
            "name": self.name,
            "state": self.state,
            "step": self._digest.last_step,
            "steps": as_count(settings.get("train.steps")),
            "preset": as_text(settings.get("preset")),
            "model": as_text(settings.get("model.name")),
            "seed": as_count(settings.get("seed"), LARGEST_COUNT),
            "techniques": self._settings.value[1] if self._settings.value else None,
            "engines": as_count(settings.get("cluster.engines")) if settings.get("cluster.backend") else None,
            "pretrain_steps": as_count(settings.get("critic.pretrain_steps"))
            if settings.get("algo.advantage") == GAE
            else None,
            "before": evaluations.get(0) if len(evaluations) > 1 else None,
            "accuracy": evaluations[max(evaluations)] if evaluations else None,
            **figures,
            "started": self.started,
            "rollouts": self._has_rollouts(),
            "seen": self._digest.offset,
            "error": self._error_line(),
            "problem": self._problem(),
        }

    @property
    def is_behind(self) -> bool:
        """Whether there is more of the log to read for the row."""
        return self._digest.is_behind

    def rest(self) -> None:
        """Frees all but the row of a finished run."""
        self._digest.forget()

    @property
    def started(self) -> float | None:
        try:
            return os.lstat(self.at("config.yaml")).st_mtime
        except OSError:
            return None

    def _error_line(self) -> str | None:
        error = self.error()
        if error is None or self._error.value is None:
            return None
        parts = [error["kind"], error["message"] and error["message"].strip().partition("\n")[0]]
        return problem_line(": ".join(part for part in parts if part)) or None

    def _problem(self) -> str | None:
        """Lists the files that cannot be read, in one line."""
        read, metrics, rollouts = self._settings.value, self.at("metrics.jsonl"), self.at("rollouts")
        no_log = os.path.lexists(metrics) and self.file("metrics.jsonl") is None
        no_rollouts = os.path.lexists(rollouts) and not (os.path.isdir(rollouts) and is_inside(rollouts, self.real))
        found = {
            "config.yaml": self._settings.problem or (read[2] if read else None),
            "summary.json": self._summary.problem or wrong_in_summary(self._summary.value or {}),
            "metrics.jsonl": not_a_file(metrics, self.real) if no_log else self._digest.problem,
            ".lock": self._lock.problem,
            "error.json": self._error.problem,
            "rollouts": "is not a directory of this run" if no_rollouts else None,
        }
        return problem_line("; ".join(f"{file}: {why}" for file, why in found.items() if why)) or None


_NAMES = ("steps", "preset", "model", "seed", "techniques", "engines", "pretrain_steps", "before", "accuracy")
_EMPTY_ROW: dict[str, Any] = {
    **dict.fromkeys(("name", "state", *_NAMES, *RECENT, *TOTALS, "started", "error", "problem")),
    **{"step": 0, "rollouts": False, "seen": 0},
}


def broken_row(run: BoardRun, error: Exception) -> dict[str, Any]:
    why = problem_line(f"cannot be read: {type(error).__name__}: {error}")
    return _EMPTY_ROW | {"name": run.name, "state": "unreadable", "problem": why}


def problem_line(text: str) -> str:
    return cut(printable(" ".join(text.split())), LONGEST_PROBLEM)
