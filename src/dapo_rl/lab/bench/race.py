"""Our contender of `bench race`, a training run, and the evaluation of all contenders' weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dapo_rl.lab.bench.race_report import RaceJob
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display
from dapo_rl.trainer import DAPOTrainer


def race_dapo(job: RaceJob) -> dict[str, Any]:
    started = time.perf_counter()
    with TemporaryDirectory(prefix="dapo-race-") as directory:
        with DAPOTrainer(config=job.config(), run_dir=Path(directory) / "run", display=Display()) as trainer:
            start_seconds = time.perf_counter() - started
            trainer.train()
        rows = RunDirectory(Path(directory) / "run").read_metrics()
    points, seconds, tokens = [], 0.0, 0
    for row in rows:
        seconds += row.get("timing_s/step", 0.0)
        tokens += row.get("sampling/tokens_generated", 0)
        if "eval/accuracy" in row:
            points.append({"step": row["step"], "seconds": seconds, "tokens": tokens, "accuracy": row["eval/accuracy"]})
    return {"points": points, "start_seconds": start_seconds}


def evaluate_weights(job: RaceJob) -> dict[str, Any]:
    """The accuracies of saved weights, by the evaluation that our own runs have."""
    accuracies = {}
    for step in job.evaluated:
        weights = () if step == 0 else (f"model.name={json.dumps(str(Path(job.weights) / str(step)))}",)
        with TemporaryDirectory(prefix="dapo-race-") as directory:
            config = job.config(*weights)
            with DAPOTrainer(config=config, run_dir=Path(directory) / "run", display=Display()) as trainer:
                accuracies[step] = trainer.evaluate()["eval/accuracy"]
    return {"accuracies": accuracies}
