"""Runs one contender of `bench race`: a training run from the same weights, on the same data, with the same rewards.

python -m dapo_rl.lab.bench.race RESULT < JOB
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from dapo_rl.config import Config
from dapo_rl.lab.bench.contender import answer
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display
from dapo_rl.trainer import DAPOTrainer


@dataclass(frozen=True, slots=True)
class RaceJob:
    contender: str
    """`dapo`, `trl`, or `evaluate`, which judges the weights that a contender saved."""
    recipe: str
    settings: tuple[str, ...]
    seed: int
    steps: int
    every: int
    """Steps between evaluations."""
    variant: str = ""
    weights: str = ""
    """Where contenders save weights, in a folder for each step that is evaluated."""

    def config(self, *more: str) -> Config:
        own = (f"seed={self.seed}", f"train.steps={self.steps}", f"eval.every={self.every}")
        quiet = (f"checkpoint.every={self.steps + 1}", "checkpoint.save_final=false", "log.rollouts=false")
        return Config.load(self.recipe, [*self.settings, *own, *quiet, *more])

    @property
    def evaluated(self) -> list[int]:
        """The steps after which the policy is evaluated."""
        return sorted({0, *range(self.every, self.steps, self.every), self.steps})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RaceJob:
        return TypeAdapter(cls).validate_json(text)


def race_dapo(job: RaceJob) -> dict[str, Any]:
    with TemporaryDirectory(prefix="dapo-race-") as directory:
        with DAPOTrainer(config=job.config(), run_dir=Path(directory) / "run", display=Display()) as trainer:
            trainer.train()
        rows = RunDirectory(Path(directory) / "run").read_metrics()
    points, seconds, tokens = [], 0.0, 0
    for row in rows:
        seconds += row.get("timing_s/step", 0.0)
        tokens += row.get("sampling/tokens_generated", 0)
        if "eval/accuracy" in row:
            points.append({"step": row["step"], "seconds": seconds, "tokens": tokens, "accuracy": row["eval/accuracy"]})
    return {"points": points}


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


def run_race(job: RaceJob) -> dict[str, Any]:
    if job.contender == "trl":
        from dapo_rl.lab.bench.race_trl import race_trl

        return race_trl(job)
    return evaluate_weights(job) if job.contender == "evaluate" else race_dapo(job)


if __name__ == "__main__":
    answer(lambda text: run_race(RaceJob.from_json(text)))
