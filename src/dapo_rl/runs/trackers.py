"""Sends metrics to TensorBoard, Weights & Biases and trackio, as set by `log.trackers`.

`metrics.jsonl` is the record of a run; a tracker is a copy. If a tracker fails, it is dropped with a note, and the run
continues. A resumed run continues the tracker's run.
"""

from __future__ import annotations

import importlib
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dapo_rl.base.files import atomic_write
from dapo_rl.base.quote import describe
from dapo_rl.base.reading import read_bytes
from dapo_rl.errors import UserError

PROJECT = "dapo-rl"
IDENTITY = "trackers.json"
"""File in the run directory with the run's id in trackers. A copy of the directory is the same run."""


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, run: Path, identity: str, settings: Mapping[str, Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))
        # Discards later records of an earlier process, as metrics.jsonl does.
        started = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step and step + 1, session_log=started))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class HostedRun:
    """A run of W&B or trackio. For steps that a resumed run repeats, W&B keeps the first record and trackio both; they
    are identical."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def weights_and_biases(run: Path, identity: str, settings: Mapping[str, Any], step: int) -> HostedRun:
    import wandb

    console = wandb.Settings(console="off")  # the display owns the terminal
    how: dict[str, Any] = {"resume": "allow", "dir": run, "config": dict(settings), "settings": console}
    return HostedRun(wandb.init(project=PROJECT, name=run.name, id=identity, **how))


def trackio(run: Path, identity: str, settings: Mapping[str, Any], step: int) -> HostedRun:
    import trackio

    name = f"{run.name}-{identity}"  # trackio identifies runs by name
    return HostedRun(trackio.init(project=PROJECT, name=name, resume="allow", config=dict(settings), embed=False))


Tracker = TensorBoard | HostedRun
TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": weights_and_biases,
    "trackio": trackio,
}


def check_installed(names: Sequence[str]) -> None:
    """Fails before a model is loaded."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"log.trackers: {name} cannot be imported ({error}); pip install 'dapo-rl[{name}]', or leave it out"
            ) from None


class Trackers:
    """The trackers of a run; `step` is the last step before it starts or resumes."""

    def __init__(
        self, names: Sequence[str], run: Path, settings: Mapping[str, Any], step: int, note: Callable[[str], None]
    ) -> None:
        self._note = note
        self._open: dict[str, Tracker] = {}
        if not names:
            return
        run = run.resolve()
        identity = _identity(run / IDENTITY)
        for name in names:
            self._try(name, "cannot start", partial(self._start, name, run, identity, settings, step))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Sends the metrics of a step, except those that are not finite."""
        numbers = {name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)}
        for name, tracker in list(self._open.items()):
            self._try(name, "failed", partial(tracker.log, step, numbers))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._try(name, "could not be closed", tracker.close)
        self._open.clear()

    def _start(self, name: str, run: Path, identity: str, settings: Mapping[str, Any], step: int) -> None:
        self._open[name] = TRACKERS[name](run, identity, settings, step)

    def _try(self, name: str, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # the network, the disk, or a login that calls sys.exit
            self._open.pop(name, None)
            own = " ".join(str(error).split())[:300] if isinstance(error, Exception) else ""
            self._note(
                f"log.trackers: {name} {what} and is dropped: {own or describe(error)}; metrics.jsonl has everything"
            )


def _identity(path: Path) -> str:
    try:
        return str(json.loads(read_bytes(path, 4096))["run"])[:80]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        identity = uuid.uuid4().hex[:8]
        atomic_write(path, json.dumps({"run": identity}) + "\n")
        return identity
