"""Computes the compared numbers from run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_rl.lab.ablate.interval import TInterval, t_interval
from dapo_rl.lab.ablate.plan import AblationPlan, Arm
from dapo_rl.lab.ablate.runs import ArmRun
from dapo_rl.runs.words import number

LAST_SHARE = 0.25
"""Final values are means over this share of the steps, since a single step or evaluation is noisy."""

Curve = dict[int, float]
"""Values by step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a finished run; None for a number that it does not have."""

    accuracy_before: float | None
    accuracy: float | None
    reward: float | None
    entropy: float | None
    response_length: float | None
    truncated: float | None
    generated_per_trained: float | None
    wall_seconds: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    run: ArmRun
    outcome: Outcome | None
    """None if the run has not finished."""
    accuracies: Curve = field(default_factory=dict)
    entropies: Curve = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: Arm
    runs: tuple[RunResult, ...]
    difference: TInterval | None
    """Difference in held-out accuracy from the arm it is compared with, paired by seed."""

    def estimate(self, quantity: str) -> TInterval | None:
        return t_interval(list(self.by_seed(quantity).values()))

    def by_seed(self, quantity: str) -> dict[int, float]:
        values = {r.run.seed: getattr(r.outcome, quantity) for r in self.runs if r.outcome is not None}
        return {seed: value for seed, value in values.items() if value is not None}


def collect(plan: AblationPlan, runs: Sequence[ArmRun]) -> list[ArmResult]:
    results = {(run.arm.name, run.seed): _result(run) for run in runs}
    of_arm = {
        arm.name: tuple(results[arm.directory, seed] for seed in plan.seeds if (arm.directory, seed) in results)
        for arm in plan.arms
    }
    collected: dict[str, ArmResult] = {}
    for arm in plan.arms:
        result = ArmResult(arm, of_arm[arm.name], None)
        if arm.compared_with is not None:
            other = collected[arm.compared_with].by_seed("accuracy")
            own = result.by_seed("accuracy")
            # Runs with the same seed share prompts and random numbers, so pairing cancels common noise.
            paired = [own[seed] - other[seed] for seed in own if seed in other]
            result = ArmResult(arm, of_arm[arm.name], t_interval(paired))
        collected[arm.name] = result
    return list(collected.values())


def outcome(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> Outcome:
    steps = int(summary["steps"])
    tokens = summary.get("tokens") or {}
    trained = number(tokens, "trained")
    return Outcome(
        accuracy_before=_known(number(summary, "accuracy_before")),
        accuracy=at_end(_evaluations(summary), steps),
        reward=at_end(_curve(metrics, "reward/mean"), steps),
        entropy=at_end(_curve(metrics, "actor/entropy"), steps),
        response_length=at_end(_curve(metrics, "response_length/mean"), steps),
        truncated=at_end(_curve(metrics, "response_length/clip_ratio"), steps),
        generated_per_trained=_known(number(tokens, "total") / trained) if trained > 0 else None,
        wall_seconds=_known(number(summary, "wall_seconds")),
    )


def at_end(curve: Curve, steps: int) -> float | None:
    """The mean over the last quarter of the steps, or the last value if there is none."""
    trained = {step: value for step, value in curve.items() if step > 0}
    if not trained:
        return None
    late = [value for step, value in trained.items() if step > (1 - LAST_SHARE) * steps]
    return math.fsum(late) / len(late) if late else trained[max(trained)]


def _result(run: ArmRun) -> RunResult:
    if run.state != "done":
        return RunResult(run, None)
    summary, metrics = run.summary(), run.directory.read_metrics()
    return RunResult(run, outcome(summary, metrics), _evaluations(summary), _curve(metrics, "actor/entropy"))


def _evaluations(summary: Mapping[str, Any]) -> Curve:
    rows = summary.get("evaluations") or []
    curve = {int(row["step"]): number(row, "accuracy") for row in rows}
    return {step: value for step, value in curve.items() if math.isfinite(value)}


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> Curve:
    curve = {int(row["step"]): number(row, name) for row in metrics}
    return {step: value for step, value in curve.items() if math.isfinite(value)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
