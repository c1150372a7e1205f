"""Computes each model's metrics from its responses, and the differences between models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dapo_rl.evals.metrics import avg, bootstrap, consensus, difference, is_graded, mean, passed, powers_of_two
from dapo_rl.evals.responses import ResponseFile
from dapo_rl.types import Verdict

COLUMNS = ("problem", "prompt_id", "sample", "tokens", "finish_reason", "vote", "score", "correct", "status", "detail")


@dataclass(frozen=True, slots=True)
class Figures:
    """The metrics of a model for every problem."""

    model: str
    k: int
    prompt_ids: list[str]
    values: dict[str, list[float]]
    """A value per problem for each metric; NaN if there is none."""
    tokens: int
    statuses: dict[str, int]
    first_error: str
    graded: bool = False
    """Whether samples that are both right, or both wrong, have different scores."""

    @property
    def verifier_errors(self) -> int:
        return self.statuses.get("timeout", 0) + self.statuses.get("error", 0)

    def report(self, seed: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "problems": len(self.prompt_ids),
            "samples": len(self.prompt_ids) * self.k,
            "tokens": self.tokens,
            "graded": self.graded,
            "metrics": {name: _numbers(asdict(bootstrap(values, seed))) for name, values in self.values.items()},
            "statuses": self.statuses,
            "verifier_errors": self.verifier_errors,
        }


def read_figures(model: str, responses: ResponseFile) -> Figures:
    rows = responses.read(COLUMNS)
    problems: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    k = max(row["sample"] for row in rows) + 1
    values: dict[str, list[float]] = {}
    for samples in problems.values():
        for name, value in _values(samples, k).items():
            values.setdefault(name, []).append(value)
    failed = [row for row in rows if _failed(row)]
    return Figures(
        model=model,
        k=k,
        prompt_ids=[samples[0]["prompt_id"] for samples in problems.values()],
        values=values,
        tokens=sum(row["tokens"] for row in rows),
        graded=is_graded((row["correct"], row["score"]) for row in rows if not _failed(row)),
        statuses=dict(sorted(Counter(row["status"] for row in rows).items())),
        first_error=failed[0]["detail"] if failed else "",
    )


def compare(first: Figures, second: Figures, seed: int) -> list[dict[str, Any]]:
    """The second model minus the first for each metric, on the problems that both answered."""
    at = {prompt_id: i for i, prompt_id in enumerate(second.prompt_ids)}
    shared = [(i, at[prompt_id]) for i, prompt_id in enumerate(first.prompt_ids) if prompt_id in at]
    differences = []
    for name in first.values:
        if name in second.values:
            ours = [first.values[name][i] for i, _ in shared]
            theirs = [second.values[name][j] for _, j in shared]
            found = _numbers(asdict(difference(ours, theirs, seed)))
            differences.append({"metric": name, "model": second.model, "against": first.model, **found})
    return differences


def _values(samples: Sequence[dict[str, Any]], k: int) -> dict[str, float]:
    judged = [row for row in samples if not _failed(row)]
    correct = [row["correct"] for row in judged]
    return {
        f"avg@{k}": avg(correct),
        **{f"pass@{j}": passed(correct, j) for j in powers_of_two(k)},
        f"cons@{k}": consensus(correct, [row["vote"] for row in judged]),
        "score": mean([row["score"] for row in judged]),
        "response_length": sum(row["tokens"] for row in samples) / len(samples),
        "truncated": sum(row["finish_reason"] == "length" for row in samples) / len(samples),
    }


def _failed(row: dict[str, Any]) -> bool:
    return Verdict(0.0, False, row["status"]).failed


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in record.items()}
