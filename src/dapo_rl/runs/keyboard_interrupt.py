"""Ctrl-C in a Python program or a notebook: the first one saves and stops, the second stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Self

from dapo_rl.base.format import short_path
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.display import Display

STOPPING = "stopping: saving the run; press Ctrl-C again to stop immediately"


class Interrupts:
    """While it is entered, Ctrl-C requests a stop instead of raising KeyboardInterrupt, unless the program handles the
    signal itself. A KeyboardInterrupt that leaves it comes with a note that says how to resume."""

    def __init__(self, directory: RunDirectory, display: Display, again: str) -> None:
        """`again` says how to continue the run in the directory `{}`."""
        self._directory, self._display, self._again = directory, display, again
        self._ours = False
        self.requested = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
        self._ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._ours:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(error, KeyboardInterrupt):
            path = short_path(self._directory.path)
            self._display.note(
                "stopped; to continue from the last checkpoint, make the trainer again with "
                + self._again.format(repr(path))
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # The signal may interrupt a write to the same stream, which is not reentrant.
        with contextlib.suppress(RuntimeError):
            self._display.note(STOPPING)
