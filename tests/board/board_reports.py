"""Ablation and evaluation directories for the board's tests, written by the commands' own writers."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from dapo_rl.demo import DEFAULT_RECIPE
from dapo_rl.evals.metrics import ModelMetrics, compare
from dapo_rl.lab.ablate.plan import AblationPlan, grid
from dapo_rl.lab.ablate.report import ablation_json
from dapo_rl.lab.ablate.results import collect
from dapo_rl.lab.ablate.runs import ArmRun, all_runs
from dapo_rl.runs.directory import RunDirectory

ARMS = ("algo.clip_high-0.2", "algo.clip_high-0.28")
STEPS = 4


def png(width: int = 60, height: int = 40) -> bytes:
    """A white picture."""
    rows = (b"\0" + b"\xff" * width) * height

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def make_plan(path: Path, seeds: int = 2) -> AblationPlan:
    """The plan of an ablation that has not started."""
    plan = grid(DEFAULT_RECIPE, [f"train.steps={STEPS}"], seeds, ["algo.clip_high=0.2,0.28"])
    path.mkdir(parents=True, exist_ok=True)
    plan.save(path / "plan.json")
    return plan


def make_ablation(path: Path, seeds: int = 2) -> AblationPlan:
    """Two arms; accuracy rises by a tenth with the seed, and by a quarter in the second arm."""
    plan = make_plan(path, seeds)
    for run in all_runs(plan, path):
        run_arm(run, base=0.25 * plan.arms.index(run.arm) + 0.1 * run.seed)
    results = collect(plan, all_runs(plan, path))
    (path / "ablation.json").write_text(ablation_json(plan, results))
    (path / "ablation.png").write_bytes(png())
    return plan


def run_arm(run: ArmRun, base: float) -> None:
    directory = RunDirectory.create(run.directory.path, run.config)
    for step in range(1, STEPS + 1):
        accuracy = base + 0.1 * step if step % 2 == 0 else None
        directory.append_metrics(step, {"actor/entropy": 1 / step + base, "acc/mean": base, "eval/accuracy": accuracy})
    evaluations = [{"step": step, "accuracy": base + 0.1 * step} for step in (0, 2, 4)]
    summary = {"finished": True, "steps": STEPS, "accuracy_before": base, "evaluations": evaluations}
    directory.write_summary(summary | {"tokens": {"total": 30, "trained": 20}, "wall_seconds": 3.0})


def figures(model: str, right: Sequence[Sequence[bool]]) -> ModelMetrics:
    """Of two samples for each problem."""
    values = {
        "avg@2": [sum(samples) / 2 for samples in right],
        "pass@1": [sum(samples) / 2 for samples in right],
        "pass@2": [float(any(samples)) for samples in right],
        "cons@2": [float(samples[0]) for samples in right],
        "response_length": [10.0 + sum(samples) for samples in right],
        "truncated": [0.0 for _ in right],
    }
    ids = [f"p{i}" for i in range(len(right))]
    return ModelMetrics(model, 2, ids, values, 100, {"correct": sum(map(sum, right))}, "")


def make_evaluation(path: Path, second: str = "runs/mine") -> dict[str, object]:
    """Four problems: the first model has 2 of 8 samples right, the second 6."""
    first = figures("tiny", [(True, False), (False, False), (True, False), (False, False)])
    other = figures(second, [(True, True), (True, False), (True, True), (False, True)])
    report = {
        "data": "arithmetic",
        "k": 2,
        "settings": {"seed": 0, "eval.temperature": 1.0},
        "models": [each.report(0) for each in (first, other)],
        "comparisons": compare(first, other, 0),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "evaluation.json").write_text(json.dumps(report))
    (path / "evaluation.png").write_bytes(png())
    return report
