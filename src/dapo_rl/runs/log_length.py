"""The length of the run log, saved in each checkpoint so that a resumed run can tell whether the log was changed."""

from __future__ import annotations

from pathlib import Path

from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.runs.directory import RunDirectory

FILE = "log.json"


class SavedLog(Saved):
    lines: Count
    bytes: Count


class LogLength:
    """The checkpoint part that saves the length of the log."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.loaded: dict[str, int] | None = None
        """The length in the checkpoint that was loaded last."""

    def save(self, directory: Path) -> None:
        write_state(directory / FILE, self._directory.metrics_length())

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            self.loaded = parse_state(SavedLog, read_state(path)).model_dump()
