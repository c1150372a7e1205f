"""How long the run log is when a checkpoint is written: a resumed run tells by it whether the log was changed since."""

from __future__ import annotations

from pathlib import Path

from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.runs.directory import RunDirectory

FILE = "log.json"


class SavedLog(Saved):
    lines: Count
    bytes: Count


class LogLength:
    """A part of a checkpoint."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.loaded: dict[str, int] | None = None
        """What the checkpoint says that was loaded last."""

    def save(self, directory: Path) -> None:
        write_state(directory / FILE, self._directory.metrics_length())

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            self.loaded = parse_state(SavedLog, read_state(path)).model_dump()
