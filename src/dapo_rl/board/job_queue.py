"""The Lab's runs: processes that run one after another, in the order of a queue."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_rl.base.process import dapo_command, start_logged
from dapo_rl.base.reading import open_regular
from dapo_rl.errors import UserError

AT_ONCE = 1
MOST_WAITING = 50
LOG = "lab.log"
TAIL = 2000
PATIENCE_S = 30.0
"""How long the board waits for runs to save when it exits."""


@dataclass(slots=True)
class Job:
    name: str
    path: Path
    recipe: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    """None while it waits."""
    stopping: bool = False
    problem: str = ""
    """Why the process could not be started."""

    @property
    def is_waiting(self) -> bool:
        return self.process is None and not self.problem

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def state(self) -> str:
        if self.process is None:
            return "failed" if self.problem else "waiting"
        code = self.process.poll()
        if code is None:
            return "stopping" if self.stopping else "running"
        return "finished" if code == 0 else "stopped" if self.stopping else "failed"

    def begin(self) -> None:
        try:
            with (self.path / LOG).open("wb") as log:
                self.process = start_logged(self.command, log)
        except OSError as error:
            self.problem = f"cannot be started: {error.strerror or error}"

    def tail(self) -> str:
        if self.problem:
            return self.problem
        try:
            with open_regular(str(self.path / LOG)) as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


class JobQueue:
    """Runs jobs one after another. A thread waits for the end of each and starts the next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._jobs: dict[str, Job] = {}
        self._lock = threading.RLock()
        self._closed = False

    def listed(self) -> list[dict[str, Any]]:
        """The jobs: those that wait in their order, after them the others, the newest first."""
        with self._lock:
            jobs = list(self._jobs.values())
        waiting = [job for job in jobs if job.is_waiting]
        others = [job for job in reversed(jobs) if not job.is_waiting]
        return [
            {name: getattr(job, name) for name in ("name", "state", "recipe")}
            | {"place": place if job.is_waiting else None, "tail": job.tail()}
            for place, job in enumerate([*waiting, *others], start=1)
        ]

    def add(self, recipe: str, words: Sequence[str]) -> str:
        """Starts `dapo train` with these arguments, now or when those before it have ended; returns the run's name."""
        with self._lock:
            if sum(job.is_waiting for job in self._jobs.values()) >= MOST_WAITING:
                raise UserError(f"{MOST_WAITING} runs are waiting already; remove one, or wait")
            path = self._new_directory()
            command = dapo_command("train", *words, "--run", str(path))
            self._jobs[path.name] = Job(path.name, path, recipe, command)
            self._go_on()
            return path.name

    def stop(self, name: str) -> None:
        """The first time the run saves and stops; the second time it stops immediately."""
        with self._lock:
            job = self._find(name)
            if job.is_running and job.process is not None:
                job.process.send_signal(signal.SIGINT if job.stopping else signal.SIGTERM)
                job.stopping = True

    def remove(self, name: str) -> None:
        with self._lock:
            job = self._find_waiting(name)
            del self._jobs[name]
            with suppress(OSError):
                job.path.rmdir()

    def sooner(self, name: str) -> None:
        """Lets a run that waits change places with the one before it."""
        with self._lock:
            self._find_waiting(name)
            waiting = [job.name for job in self._jobs.values() if job.is_waiting]
            at = waiting.index(name)
            if at > 0:
                waiting[at - 1], waiting[at] = waiting[at], waiting[at - 1]
            rest = {key: job for key, job in self._jobs.items() if not job.is_waiting}
            self._jobs = rest | {key: self._jobs[key] for key in waiting}

    def close(self) -> None:
        """Empties the queue and stops the runs in progress; each saves first."""
        with self._lock:
            self._closed = True
            for job in [job for job in self._jobs.values() if job.is_waiting]:
                self.remove(job.name)
            running = [job for job in self._jobs.values() if job.is_running]
            for job in running:
                if not job.stopping:
                    self.stop(job.name)
        for job in running:
            assert job.process is not None
            try:
                job.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def _go_on(self) -> None:
        with self._lock:
            while not self._closed and sum(job.is_running for job in self._jobs.values()) < AT_ONCE:
                job = next((job for job in self._jobs.values() if job.is_waiting), None)
                if job is None:
                    return
                job.begin()
                if job.process is not None:
                    threading.Thread(target=self._await, args=(job.process,), name=job.name, daemon=True).start()

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._go_on()

    def _find(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise UserError("only runs that were started here can be stopped here")
        return job

    def _find_waiting(self, name: str) -> Job:
        job = self._find(name)
        if not job.is_waiting:
            raise UserError(f"{name} does not wait any more; stop it instead")
        return job

    def _new_directory(self) -> Path:
        number = 0
        while True:
            number += 1
            path = self.directory / f"lab-{number:03d}"
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                if not self.directory.is_dir():
                    raise UserError(f"{self.directory}: is not a directory; runs cannot be started") from None
            except OSError as error:
                raise UserError(f"{path}: cannot be created: {error.strerror}") from None
