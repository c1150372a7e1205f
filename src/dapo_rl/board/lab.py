"""The Lab: runs of the embedded default with techniques switched on or off, started and stopped from the page."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dapo_rl.board.files import open_regular
from dapo_rl.config import Config
from dapo_rl.demo import DEFAULT_RECIPE
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES

AT_ONCE = 2
LOG = "lab.log"
TAIL = 2000
PATIENCE_S = 30.0
"""How long the board waits for runs to save when it exits."""


class Start(BaseModel):
    """The settings that the page may choose; all others are those of the embedded default."""

    model_config = ConfigDict(extra="forbid", strict=True)
    techniques: list[str] = Field(max_length=len(TECHNIQUES))
    steps: int = Field(40, ge=1, le=10_000)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    eval_prompts: int = Field(128, ge=1, le=512)


@dataclass(slots=True)
class LabJob:
    name: str
    path: Path
    process: subprocess.Popen[bytes]
    stopping: bool = False

    @property
    def state(self) -> str:
        code = self.process.poll()
        if code is None:
            return "stopping" if self.stopping else "running"
        return "finished" if code == 0 else "stopped" if self.stopping else "failed"

    def tail(self) -> str:
        """The end of the run's output."""
        try:
            with open_regular(str(self.path / LOG)) as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


class Lab:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._jobs: dict[str, LabJob] = {}
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """The switches, as set in the embedded default."""
        base = Config.load(DEFAULT_RECIPE)
        return {
            "techniques": [
                {
                    "name": technique.name,
                    "on": technique.is_on(base),
                    "meaning": technique.meaning,
                    "settings": [
                        ", ".join(_words(shown)) for shown in (technique.settings(base, False), dict(technique.on))
                    ],
                }
                for technique in TECHNIQUES
            ],
            "steps": base.train.steps,
            "jobs": self.jobs(),
        }

    def jobs(self) -> list[dict[str, Any]]:
        with self._lock:
            jobs = list(self._jobs.values())
        return [{"name": job.name, "state": job.state, "tail": job.tail()} for job in reversed(jobs)]

    def start(self, wanted: Start) -> str:
        """Starts a run and returns its name."""
        overrides = overrides_for(wanted)
        with self._lock:
            if sum(job.process.poll() is None for job in self._jobs.values()) >= AT_ONCE:
                raise UserError(f"{AT_ONCE} runs are already in progress; stop one, or wait for it")
            path = self._new_directory()
            command = [sys.executable, "-P", "-m", "dapo_rl.cli", "train", *overrides, "--run", str(path)]
            with (path / LOG).open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C then reaches only the board, which stops its runs itself
                )
            self._jobs[path.name] = LabJob(path.name, path, process)
            return path.name

    def stop(self, name: str) -> None:
        """The first time the run finishes its step and saves; the second time it stops immediately."""
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                raise UserError("only runs that were started here can be stopped here")
            if job.process.poll() is None:
                job.stopping = True
                job.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Stops all runs in progress; each saves first."""
        running = [job for job in self._jobs.values() if job.process.poll() is None]
        for job in running:
            if not job.stopping:
                self.stop(job.name)
        for job in running:
            try:
                job.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def _new_directory(self) -> Path:
        number = 1
        while True:
            path = self.directory / f"lab-{number:03d}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                if not self.directory.is_dir():
                    raise UserError(f"{self.directory}: is not a directory; runs cannot be started") from None
                number += 1
            except OSError as error:
                raise UserError(f"{path}: cannot be created: {error.strerror}") from None
            else:
                return path


def overrides_for(wanted: Start) -> list[str]:
    """The command-line overrides for a choice; mistakes are found before anything starts."""
    unknown = set(wanted.techniques) - {technique.name for technique in TECHNIQUES}
    if unknown:
        raise UserError(f"there is no technique {sorted(unknown)[0]!r}")
    base = Config.load(DEFAULT_RECIPE)
    changes: dict[str, Any] = {}
    for technique in TECHNIQUES:
        changes |= technique.settings(base, technique.name in wanted.techniques)
    changes |= {"train.steps": wanted.steps, "seed": wanted.seed, "eval.prompts": wanted.eval_prompts}
    overrides = _words(changes)
    Config.load(DEFAULT_RECIPE, overrides)
    return overrides


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in settings.items()]
