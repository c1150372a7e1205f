"""Ablations and evaluations: directories with a report and a picture, which are listed beside runs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dapo_rl.board.files import Remembered, UnreadableError, identity, is_alive, read_all, read_owner, regular
from dapo_rl.board.run import BoardRun, problem_line

LARGEST_PICTURE = 32 << 20
PNG = b"\x89PNG\r\n\x1a\n"

RunsByPath = Mapping[str, BoardRun]
"""The runs of the board by their resolved paths."""


class BoardReport(ABC):
    """The directory of an ablation or an evaluation, with its cached content."""

    kind: ClassVar[str]
    picture_name: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    """The files that the row depends on; the newest dates it."""

    def __init__(self, name: str, path: Path, real: str) -> None:
        self.name, self.path, self.real = name, path, real
        self._lock = Remembered(self._at(".lock"), real, read_owner)
        self._cached: tuple[Any, dict[str, Any]] = (None, {})

    @abstractmethod
    def row_of(self, runs: RunsByPath) -> dict[str, Any]:
        """The row, without its name, kind and date."""

    @abstractmethod
    def page(self, runs: RunsByPath) -> dict[str, Any]:
        """The content of its page."""

    @property
    def is_written(self) -> bool:
        return is_alive(self._lock.look())

    def row(self, runs: RunsByPath) -> dict[str, Any]:
        """The row in the list; files that have not changed are not read again."""
        is_written = self.is_written
        glance = (*(identity(self._at(name)) for name in self.files), is_written)
        if self._cached[0] != glance or is_written:
            self._cached = glance, self._row(runs)
        return self._cached[1]

    def _row(self, runs: RunsByPath) -> dict[str, Any]:
        head = {"kind": self.kind, "name": self.name, "started": self._started()}
        try:
            return _EMPTY | head | self.row_of(runs)
        except Exception as error:  # untrusted content may raise anything; it concerns only this row
            why = f"cannot be read: {type(error).__name__}: {error}"
            return _EMPTY | head | {"state": "unreadable", "problem": problem_line(why)}

    def picture(self) -> bytes | None:
        """The picture that the command wrote; None if there is none."""
        path = self._at(self.picture_name)
        if not regular(path, self.real):
            return None
        try:
            content = read_all(path, LARGEST_PICTURE)
        except OSError:
            return None
        if not content.startswith(PNG):
            raise UnreadableError(f"{self.picture_name}: not a PNG picture")
        return content

    def has_picture(self) -> bool:
        return regular(self._at(self.picture_name), self.real)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _started(self) -> float | None:
        dates = [found[2] for name in self.files if (found := identity(self._at(name))) is not None]
        return max(dates) / 1e9 if dates else None


_EMPTY: dict[str, Any] = dict.fromkeys(
    ("kind", "name", "state", "step", "steps", "accuracy", "best", "what", "model", "started", "error", "problem")
)
