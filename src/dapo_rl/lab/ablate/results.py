"""Computes the compared numbers from run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_rl.base.parquet import read_columns
from dapo_rl.lab.ablate.plan import AblationPlan, Arm
from dapo_rl.lab.ablate.runs import ArmRun
from dapo_rl.lab.ablate.statistics import SeedDifference, TInterval, paired_difference, t_interval
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.metric_text import number

LAST_SHARE = 0.25
"""Final values are means over this share of the steps, since a single step or evaluation is noisy."""

Curve = dict[int, float]
"""Values by step."""


Numbers = dict[str, float | None]
"""The results of a finished run by their names in ablation.json; None for a number that it does not have."""

AT_END = {
    "reward": "reward/mean",
    "entropy": "actor/entropy",
    "response_length": "response_length/mean",
    "truncated": "response_length/clip_ratio",
}
OVER_THE_RUN = {
    "mean_entropy": "actor/entropy",
    "mean_length": "response_length/mean",
    "mean_truncated": "response_length/clip_ratio",
    "clipped_high": "actor/pg_clipfrac_high",
    "clipped_prob": "actor/clipped_high_prob",
}
"""Metrics of which all steps count that have them."""


@dataclass(frozen=True, slots=True)
class RunResult:
    run: ArmRun
    final: Numbers | None
    accuracies: Curve = field(default_factory=dict)
    entropies: Curve = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: Arm
    runs: tuple[RunResult, ...]
    difference: SeedDifference | None
    """Difference in held-out accuracy from the arm it is compared with, paired by seed."""
    differences: Mapping[str, SeedDifference] = field(default_factory=dict)

    def estimate(self, quantity: str) -> TInterval | None:
        return t_interval(list(self.by_seed(quantity).values()))

    def by_seed(self, quantity: str) -> dict[int, float]:
        values = {r.run.seed: r.final.get(quantity) for r in self.runs if r.final is not None}
        return {seed: value for seed, value in values.items() if value is not None}


def collect(plan: AblationPlan, runs: Sequence[ArmRun]) -> list[ArmResult]:
    by_run = {(run.arm.name, run.seed): _result(run, plan) for run in runs}
    collected: dict[str, ArmResult] = {}
    for arm in plan.arms:
        of_arm = tuple(by_run[arm.directory, seed] for seed in plan.seeds if (arm.directory, seed) in by_run)
        result = ArmResult(arm, of_arm, None)
        if arm.compared_with is not None:
            result = _compared(result, collected[arm.compared_with], plan)
        collected[arm.name] = result
    return list(collected.values())


def _compared(result: ArmResult, other: ArmResult, plan: AblationPlan) -> ArmResult:
    found = {
        name: paired_difference(result.by_seed(name), other.by_seed(name), plan.comparisons)
        for name in dict.fromkeys(("accuracy", *plan.compared))
    }
    differences = {name: each for name in plan.compared if (each := found[name]) is not None}
    return ArmResult(result.arm, result.runs, found["accuracy"], differences)


def final_metrics(
    summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], to_accuracy: float | None = None
) -> Numbers:
    steps, accuracy, tokens = int(summary["steps"]), _evaluations(summary), summary.get("tokens") or {}
    trained = number(tokens, "trained")
    found = {
        "accuracy_before": _known(number(summary, "accuracy_before")),
        "accuracy": at_end(accuracy, steps),
        **{name: at_end(_curve(metrics, metric), steps) for name, metric in AT_END.items()},
        "generated_per_trained": _known(number(tokens, "total") / trained) if trained > 0 else None,
        "wall_seconds": _known(number(summary, "wall_seconds")),
        "mean_accuracy": _mean(accuracy),
        **{name: _mean(_curve(metrics, metric)) for name, metric in OVER_THE_RUN.items()},
        **dict.fromkeys(("steps_to", "tokens_to", "reached", "repetition")),
    }
    if to_accuracy is not None:  # a run that does not reach it counts with all its steps
        reached = step_of_accuracy(accuracy, to_accuracy)
        until = steps if reached is None else reached
        generated = tokens_until(_curve(metrics, "sampling/tokens_generated"), until)
        found |= {"steps_to": until, "tokens_to": generated, "reached": reached is not None}
    return found


def step_of_accuracy(curve: Curve, accuracy: float) -> float | None:
    """The first step with this accuracy, on straight lines between evaluations; None if there is none."""
    before: tuple[int, float] | None = None
    for step, value in sorted(curve.items()):
        if value >= accuracy:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (accuracy - before[1]) / (value - before[1])
        before = step, value
    return None


def tokens_until(by_step: Curve, until: float) -> float:
    """The tokens generated in the steps up to `until`, with its part of the step that it falls into."""
    return math.fsum(tokens * min(1.0, max(0.0, until - (step - 1))) for step, tokens in by_step.items())


def at_end(curve: Curve, steps: int) -> float | None:
    """The mean over the last quarter of the steps, or the last value if there is none."""
    trained = {step: value for step, value in curve.items() if step > 0}
    if not trained:
        return None
    late = [value for step, value in trained.items() if step > (1 - LAST_SHARE) * steps]
    return math.fsum(late) / len(late) if late else trained[max(trained)]


def _result(run: ArmRun, plan: AblationPlan) -> RunResult:
    if run.state != "done":
        return RunResult(run, None)
    summary, metrics = run.directory.read_summary(), run.directory.read_metrics()
    found = final_metrics(summary, metrics, plan.to_accuracy)
    if "repetition" in plan.compared:
        found["repetition"] = at_end(repetition_by_step(run.directory), int(summary["steps"]))
    return RunResult(run, found, _evaluations(summary), _curve(metrics, "actor/entropy"))


def _evaluations(summary: Mapping[str, Any]) -> Curve:
    return _curve(summary.get("evaluations") or [], "accuracy")


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> Curve:
    curve = {int(row["step"]): number(row, name) for row in metrics}
    return {step: value for step, value in curve.items() if math.isfinite(value)}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(curve: Curve) -> float | None:
    """The mean over the steps; an evaluation before the first is not one of them."""
    values = [value for step, value in curve.items() if step > 0]
    return math.fsum(values) / len(values) if values else None


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """How much a response repeats itself (seq-rep-n of Welleck et al., 2020): 1 − distinct n-grams / n-grams, and 0 for
    one that is shorter than two of them."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repetition_by_step(directory: RunDirectory) -> dict[int, float]:
    """The mean over everything sampled in a step, for the steps whose rollouts are kept."""
    means: dict[int, float] = {}
    for step in directory.rollout_steps():
        table = read_columns(directory.rollout(step), ["token_ids"])
        shares = [repeated_share(tokens) for tokens in table["token_ids"].to_pylist()]
        if shares:
            means[step] = sum(shares) / len(shares)
    return means
