"""Measures a whole step of `DAPOTrainer`: sampling, verification, update, and weight transfer to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dapo_rl.config import Config
from dapo_rl.lab.bench.model_shapes import open_model, random_prompts
from dapo_rl.lab.bench.roofline import Size
from dapo_rl.lab.bench.timing import StepClock
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.memory.one_gpu import NOTE
from dapo_rl.models.load import pick_device
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display
from dapo_rl.trainer import DAPOTrainer

PARTS = {"gen": "timing_s/gen", "verify": "timing_s/verify", "update": "timing_s/update"}


def measure_step(work: Workload) -> Measurement:
    config = work.config()
    model, tokenizer = open_model(work.model, torch.float32, work.device, work.seed)
    prompts = random_prompts(tokenizer, work.prompts * (work.rounds + 1), work.prompt_tokens, work.seed)
    watch = _Watch(work, pick_device(work.device))
    with TemporaryDirectory(prefix="dapo-bench-") as directory:
        run_dir = Path(directory) / "run"
        trainer = DAPOTrainer(
            model,
            reward_funcs=alternating_rewards,
            train_dataset=[{"prompt": text} for text in prompts],
            config=config,
            processing_class=tokenizer,
            run_dir=run_dir,
            display=watch,
        )
        with trainer, suppress(_EnoughError):
            trainer.train()
        rows = RunDirectory(run_dir).read_metrics()[work.warmup : work.rounds]
    generated = {row["sampling/tokens_generated"] for row in rows}
    if generated != {work.response_tokens}:
        raise AssertionError(f"a step had {sorted(generated)} tokens, not {work.response_tokens}")
    return Measurement(
        seconds=tuple(row["timing_s/step"] for row in rows),
        peak_memory_bytes=watch.clock.memory.peak,
        memory=watch.clock.memory.how,
        parts={name: median(row[key] for row in rows) for name, key in PARTS.items()} | watch.wall(),
        facts={"size": asdict(Size.of(model)), **watch.plan},
    )


def alternating_rewards(completions: list[Any], **_: Any) -> list[float]:
    """Half of each group is correct, so its advantages are never all zero."""
    return [float(i % 2) for i in range(len(completions))]


class _EnoughError(Exception):
    """Ends the run after the measurement: a run that finishes would write a checkpoint and a model."""


class _Watch(Display):
    """A display that shows nothing and records the end of each step."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self._work, self.clock = work, StepClock(work, device)
        self.plan: dict[str, str] = {}
        """The note on memory savings, if the run needs any to fit into GPU memory."""

    def wall(self) -> dict[str, float]:
        gaps = self.clock.seconds[max(self._work.warmup, 1) :]
        return {"wall": median(gaps)} if gaps else {}

    def start(self, total_steps: int, config: Config, model_description: str = "", steps_done: int = 0) -> None:
        self.clock.step_ended(0)

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.clock.step_ended(step)
        if step == self._work.rounds:
            raise _EnoughError

    def note(self, text: str) -> None:
        if text.startswith(NOTE):
            self.plan.setdefault("memory_plan", text)
