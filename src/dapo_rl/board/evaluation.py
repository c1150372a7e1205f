"""An evaluation in the list and on its page: the metrics of each model with intervals, and the paired tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.board.files import (
    LARGEST_COUNT,
    UnreadableError,
    as_count,
    as_items,
    as_list,
    as_number,
    as_text,
    read_object,
)
from dapo_rl.board.reports import BoardReport, RunsByPath
from dapo_rl.board.run import problem_line

LARGEST_REPORT = 4 << 20
MOST_MODELS, MOST_METRICS, MOST_COMPARISONS, MOST_SETTINGS = 64, 64, 2000, 200
NUMBERS = ("value", "low", "high", "p")


class BoardEvaluation(BoardReport):
    kind = "evaluation"
    picture_name = "evaluation.png"
    files = ("evaluation.json",)

    def __init__(self, name: str, path: Path, real: str) -> None:
        super().__init__(name, path, real)
        self._report = self._remembered("evaluation.json", _read)

    def row_of(self, runs: RunsByPath) -> dict[str, Any]:
        report = self._report.look()
        if report is None:
            return {"state": "unreadable", "problem": self._problem()}
        models, main = report["models"], f"avg@{report['k']}"
        means = {model["model"]: model["metrics"].get(main, {}).get("value") for model in models}
        known = {name: value for name, value in means.items() if value is not None}
        best = max(known, key=known.__getitem__) if known else None
        counts = [counted(models[0]["problems"] or 0, "problem"), counted(report["k"], "sample") + " each"]
        return {
            "state": "running" if self.is_written else "finished",
            "accuracy": known[best] if best else None,
            "best": f"{main} of {best}" if best else None,
            "what": f"{report['data']}: {', '.join(counts)}",
            "model": models[0]["model"] if len(models) == 1 else f"{len(models)} models",
            "problem": self._problem(),
        }

    def page(self, runs: RunsByPath) -> dict[str, Any]:
        report = self._report.look()
        if report is None:
            raise UnreadableError(f"evaluation.json: {self._report.problem or 'was deleted just now'}")
        return {
            **report,
            "name": self.name,
            "state": "running" if self.is_written else "finished",
            "picture": self.picture_version(),
        }

    def _problem(self) -> str | None:
        return problem_line(f"evaluation.json: {self._report.problem}") if self._report.problem else None


def _read(path: str) -> dict[str, Any]:
    found = read_object(path, LARGEST_REPORT)
    models, k = found.get("models"), as_count(found.get("k"))
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise UnreadableError("has no models")
    if k is None:
        raise UnreadableError("k is not a number of samples")
    return {
        "data": as_text(found.get("data")) or "",
        "k": k,
        "models": [_model(model) for model in models[:MOST_MODELS]],
        "comparisons": [
            {"metric": as_text(row.get("metric")), "model": as_text(row.get("model")), **_numbers(row)}
            for row in as_list(found.get("comparisons"), MOST_COMPARISONS)
            if isinstance(row, dict)
        ],
        "settings": {key: as_text(str(value)) for key, value in as_items(found.get("settings"), MOST_SETTINGS, 200)},
    }


def _model(found: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("problems", "samples", "tokens", "verifier_errors")
    metrics, statuses = (as_items(found.get(name), MOST_METRICS, 100) for name in ("metrics", "statuses"))
    return {
        "model": as_text(found.get("model")) or "?",
        **{name: as_count(found.get(name), LARGEST_COUNT) for name in counts},
        "metrics": {name: _numbers(values) for name, values in metrics if isinstance(values, dict)},
        "statuses": {name: as_count(value, LARGEST_COUNT) for name, value in statuses},
    }


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_number(found[name]) for name in NUMBERS if name in found} | {
        "problems": as_count(found.get("problems"), LARGEST_COUNT)
    }
