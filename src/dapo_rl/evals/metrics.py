"""Metrics of models' responses, with confidence intervals over problems, and the differences between models.

The samples of a problem are not independent, so the bootstrap resamples problems: an interval covers the choice of
problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo_rl.base.json_value import json_value
from dapo_rl.evals.responses import ResponseFile
from dapo_rl.objectives.pass_at_k import pass_at_k
from dapo_rl.types import Verdict

RESAMPLES = 10_000
LEVEL = 0.95
EXACT_UP_TO = 12
"""Up to this many problems, the permutation test enumerates all 2ⁿ ways to swap two models."""
COLUMNS = ("problem", "prompt_id", "sample", "tokens", "finish_reason", "vote", "score", "correct", "status", "detail")
"""The columns of the responses that the metrics need."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModelMetrics:
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
            "metrics": {name: json_value(bootstrap(values, seed)) for name, values in self.values.items()},
            "statuses": self.statuses,
            "verifier_errors": self.verifier_errors,
        }


def read_metrics(model: str, responses: ResponseFile) -> ModelMetrics:
    rows = responses.read(COLUMNS)
    problems: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    k = max(row["sample"] for row in rows) + 1
    values: dict[str, list[float]] = {}
    for samples in problems.values():
        for name, value in _metrics_of(samples, k).items():
            values.setdefault(name, []).append(value)
    failed = [row for row in rows if is_failed(row)]
    return ModelMetrics(
        model=model,
        k=k,
        prompt_ids=[samples[0]["prompt_id"] for samples in problems.values()],
        values=values,
        tokens=sum(row["tokens"] for row in rows),
        graded=is_graded((row["correct"], row["score"]) for row in rows if not is_failed(row)),
        statuses=dict(sorted(Counter(row["status"] for row in rows).items())),
        first_error=failed[0]["detail"] if failed else "",
    )


def compare(first: ModelMetrics, second: ModelMetrics, seed: int) -> list[dict[str, Any]]:
    """The second model minus the first for each metric, on the problems that both answered."""
    at = {prompt_id: i for i, prompt_id in enumerate(second.prompt_ids)}
    shared = [(i, at[prompt_id]) for i, prompt_id in enumerate(first.prompt_ids) if prompt_id in at]
    differences = []
    for name in first.values:
        if name in second.values:
            ours = [first.values[name][i] for i, _ in shared]
            theirs = [second.values[name][j] for _, j in shared]
            found = json_value(difference(ours, theirs, seed))
            differences.append({"metric": name, "model": second.model, "against": first.model, **found})
    return differences


def _metrics_of(samples: Sequence[dict[str, Any]], k: int) -> dict[str, float]:
    judged = [row for row in samples if not is_failed(row)]
    correct = [row["correct"] for row in judged]
    return {
        f"avg@{k}": avg(correct),
        **{f"pass@{j}": passed(correct, j) for j in powers_of_two(k)},
        f"cons@{k}": consensus(correct, [row["vote"] for row in judged]),
        "score": mean([row["score"] for row in judged]),
        "response_length": sum(row["tokens"] for row in samples) / len(samples),
        "truncated": sum(row["finish_reason"] in ("length", "turns") for row in samples) / len(samples),
    }


def is_failed(row: Mapping[str, Any]) -> bool:
    """Whether the verifier failed on a sample."""
    return Verdict(0.0, False, row["status"]).failed


def avg(correct: Sequence[bool]) -> float:
    """The share of a problem's samples that are right (avg@k); NaN if none was judged."""
    return sum(correct) / len(correct) if correct else math.nan


def passed(correct: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right (pass@k); NaN if fewer were judged."""
    return pass_at_k(len(correct), sum(correct), k) if len(correct) >= k else math.nan


def consensus(correct: Sequence[bool], votes: Sequence[str | None]) -> float:
    """Whether the answer with the most votes is right (cons@k); NaN if none was judged.

    A vote is the answer that a sample counts towards; None is an abstention. Among answers with equally many votes,
    the one sampled first wins. Without votes, the result is wrong.
    """
    if not correct:
        return math.nan
    counts = Counter(vote for vote in votes if vote is not None)
    return float(correct[votes.index(max(counts, key=counts.__getitem__))]) if counts else 0.0


def is_graded(verdicts: Iterable[tuple[bool, float]]) -> bool:
    """Whether samples that are both right, or both wrong, have different scores; `verdicts` are (correct, score)."""
    scores: dict[bool, float] = {}
    return any(scores.setdefault(correct, score) != score for correct, score in verdicts)


def powers_of_two(most: int) -> list[int]:
    """The powers of two up to `most`, and `most` itself."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def mean(values: Sequence[float]) -> float:
    """The mean over problems with a value; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def bootstrap(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The mean over problems with its percentile bootstrap interval, and the number of problems with a value: one on
    which the verifier always failed has none."""
    known = _known(values)
    low, high = _interval(known, seed)
    return {"value": mean(values), "low": low, "high": high, "problems": len(known)}


def difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The mean of the second model minus that of the first, on the problems for which both have a value.

    The interval is a bootstrap over problems; `p` is the two-sided p-value of a permutation test that swaps the models.
    """
    deltas = _known(np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64))
    low, high = _interval(deltas, seed)
    value = mean([float(d) for d in deltas])
    return {"value": value, "low": low, "high": high, "p": _swap_test(deltas, seed), "problems": len(deltas)}


def _known(values: Sequence[float] | Values) -> Values:
    array = np.asarray(values, dtype=np.float64)
    return array[~np.isnan(array)]


def _interval(values: Values, seed: int) -> tuple[float, float]:
    if len(values) == 0:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    block = max(1, 2**22 // len(values))  # bounds memory
    for start in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - start)
        means[start : start + count] = values[rng.integers(len(values), size=(count, len(values)))].mean(axis=1)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _swap_test(deltas: Values, seed: int) -> float:
    """The share of sign flips, including the identity, whose sum is at least as far from 0."""
    n = len(deltas)
    if n == 0:
        return math.nan
    # With a tolerance: sums that are equal in exact arithmetic may differ in the last bits.
    reached = abs(float(deltas.sum())) - 1e-9 * float(np.abs(deltas).sum())
    if n <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float((np.abs(signs @ deltas) >= reached).mean())
    rng = np.random.default_rng(seed)
    hits, block = 0, max(1, 2**22 // n)
    for start in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - start)
        signs = 1 - 2 * rng.integers(2, size=(count, n))
        hits += int((np.abs(signs @ deltas) >= reached).sum())
    return (hits + 1) / (RESAMPLES + 1)
