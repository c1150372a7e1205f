"""The training runs of an ablation: separate processes, several at a time, followed through their run directories."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from dapo_rl.base.files import atomic_write, remove_directory
from dapo_rl.base.process import dapo_command, start_logged
from dapo_rl.base.quote import printable
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import AblationPlan, Arm, differences
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.metrics_log import MetricsLog

POLL_SECONDS = 0.2
STOPPING = (
    "stopping: runs save and stop; press Ctrl-C again to stop immediately",
    "stopping immediately",
    "killed",
)

State = Literal["waiting", "running", "done", "failed", "stopped"]


class ArmRun:
    def __init__(self, out: Path, arm: Arm, seed: int, keep_model: bool = False) -> None:
        """`keep_model`: whether a run that finishes keeps its checkpoints and its model."""
        self.arm, self.seed, self._keep_model = arm, seed, keep_model
        home = out / arm.directory
        self.directory = RunDirectory(home / f"seed-{seed}")
        self.recipe_path = home / "recipe.yaml"
        self.log_path = home / f"seed-{seed}.log"
        self.config = arm.config(seed)
        self.steps = self.config.train.steps
        self.state: State = "waiting"
        self.step = 0
        self.accuracy: float | None = None
        """Held-out accuracy at the latest evaluation."""
        self.message = ""
        self.exit_code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = MetricsLog(lambda: self.directory.metrics_path, {"eval/accuracy"})
        self._follow()
        if self.is_finished():
            self.state = "done"

    @property
    def name(self) -> str:
        return f"{self.arm.label}, seed {self.seed}"

    def is_finished(self) -> bool:
        """Whether it reached its last step. Raises UserError if the directory holds a run with different settings."""
        if not self.directory.config_path.exists():
            return False
        if listed := differences(self.directory.read_config().resolved(), self.config.resolved()):
            raise UserError(
                f"{self.directory.path}: holds a run with different settings: {listed}; move it, or name another "
                "directory with --out"
            )
        summary = self.directory.read_summary()
        return summary.get("finished") is True and summary.get("steps") == self.steps

    def start(self, threads: int) -> None:
        self.recipe_path.parent.mkdir(parents=True, exist_ok=True)
        settings = yaml.safe_dump(self.arm.settings, sort_keys=False, allow_unicode=True)
        atomic_write(self.recipe_path, settings)
        keep = f"checkpoint.save_final={str(self._keep_model).lower()}"
        words = [str(self.recipe_path), f"seed={self.seed}", "--run", str(self.directory.path), keep]
        if self.directory.config_path.exists():
            words.append("--resume")
        variables = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("ab") as log:
            self._process = start_logged(dapo_command("train", *words), log, variables)
        self.state = "running"

    def poll(self, stopping: bool) -> bool:
        """Updates the state; returns whether something has changed."""
        before = (self.state, self.step, self.accuracy)
        assert self._process is not None
        code = self._process.poll()
        self._follow()
        if code is not None:
            self._process = None
            if code == 0 and self.is_finished():
                self.state = "done"
                if not self._keep_model:
                    self._remove_model()
            elif stopping or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                self.state = "stopped"
            else:
                self.state, self.exit_code, self.message = "failed", code, self._last_words(code)
        return before != (self.state, self.step, self.accuracy)

    def interrupt(self, times: int) -> None:
        """1: it saves and stops. 2: it stops immediately. 3: it is killed."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            if times < 3:
                self._process.send_signal(signal.SIGINT)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _remove_model(self) -> None:
        """Removes the checkpoints and the model: a finished run is compared by its log and its summary. The tokenizer
        stays, because the board shows rollouts with it."""
        if self.directory.checkpoints_path.is_dir():
            remove_directory(self.directory.checkpoints_path)
        for path in self.directory.model_path.glob("*"):
            if path.is_file() and path.name != "tokenizer.json":
                path.unlink()
        summary = self.directory.read_summary()
        if isinstance(paths := summary.get("paths"), dict) and paths.pop("model", None):
            self.directory.write_summary(summary)

    def _follow(self) -> None:
        self._log.refresh()
        self.step, self.accuracy = self._log.last_step, self._log.latest("eval/accuracy")

    def _last_words(self, code: int) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        said = printable(last.removeprefix("dapo: "))[:400]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{said or 'no output'} ({how}; {self.log_path})"


def all_runs(plan: AblationPlan, out: Path, keep_models: bool = False) -> list[ArmRun]:
    """All runs, ordered by seed, so that the first results cover every arm."""
    return [ArmRun(out, arm, seed, keep_models) for seed in plan.seeds for arm in plan.with_own_runs()]


class RunObserver(Protocol):
    def changed(self, run: ArmRun) -> None:
        """Called when a run started, made a step or ended."""

    def note(self, text: str) -> None: ...


def run_all(runs: Sequence[ArmRun], jobs: int, display: RunObserver) -> int | None:
    """Runs those that wait; a failure does not stop the others. Returns the signal that stopped it, if any."""
    waiting = [run for run in runs if run.state == "waiting"]
    running: list[ArmRun] = []
    threads = max(1, _cores() // jobs)
    with _signals() as received:
        told = 0
        try:
            while running or (waiting and not received):
                while waiting and len(running) < jobs and not received:
                    run = waiting.pop(0)
                    run.start(threads)
                    running.append(run)
                    display.changed(run)
                while told < len(received):
                    told += 1
                    display.note(STOPPING[min(told, len(STOPPING)) - 1])
                    for run in running:
                        run.interrupt(told)
                for run in running:
                    if run.poll(stopping=bool(received)):
                        display.changed(run)
                running = [run for run in running if run.state == "running"]
                if running:
                    time.sleep(POLL_SECONDS)
        finally:  # leave no process behind on an error
            for run in running:
                run.interrupt(1)
            for run in running:
                run.wait()
    return received[0] if received else None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals instead of handling them."""
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(number)

    # SIGHUP: if the terminal is closed, the runs, which have their own sessions, would continue alone.
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
