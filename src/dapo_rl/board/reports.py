"""Ablations and evaluations: directories with a report and a picture, which are listed beside runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dapo_rl.board.files import BoardDirectory, UnreadableError, identity, read_all
from dapo_rl.board.run import BoardRun, problem_line

LARGEST_PICTURE = 32 << 20
PNG = b"\x89PNG\r\n\x1a\n"

RunsByPath = Mapping[str, BoardRun]
"""The runs of the board by their resolved paths."""


class BoardReport(BoardDirectory, ABC):
    """The directory of an ablation or an evaluation, with its cached content."""

    kind: ClassVar[str]
    picture_name: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    """The files that the row depends on; the newest dates it."""

    def __init__(self, name: str, path: Path, real: str) -> None:
        super().__init__(name, path, real)
        self._cached: tuple[Any, dict[str, Any]] = (None, {})

    @abstractmethod
    def row_of(self, runs: RunsByPath) -> dict[str, Any]:
        """The row, without its name, kind and date."""

    @abstractmethod
    def page(self, runs: RunsByPath) -> dict[str, Any]:
        """The content of its page."""

    def row(self, runs: RunsByPath) -> dict[str, Any]:
        """The row in the list; files that have not changed are not read again."""
        is_written = self.is_written
        glance = (*(identity(self.at(name)) for name in self.files), is_written)
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
        path = self.file(self.picture_name)
        if path is None:
            return None
        try:
            content = read_all(str(path), LARGEST_PICTURE)
        except OSError:
            return None
        if not content.startswith(PNG):
            raise UnreadableError(f"{self.picture_name}: not a PNG picture")
        return content

    def picture_version(self) -> str | None:
        """Another text when there is another picture; None if there is none."""
        path = self.file(self.picture_name)
        return None if path is None else str(identity(str(path)))

    def _started(self) -> float | None:
        dates = [found[2] for name in self.files if (found := identity(self.at(name))) is not None]
        return max(dates) / 1e9 if dates else None


_EMPTY: dict[str, Any] = dict.fromkeys(
    ("kind", "name", "state", "step", "steps", "accuracy", "best", "what", "model", "started", "error", "problem")
)
