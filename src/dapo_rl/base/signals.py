"""Signals of the `dapo` command: SIGINT and SIGTERM let a run save, and Ctrl-C ends what has nothing to save."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from dapo_rl.base.streams import complain


def stop_at_once() -> None:
    """Makes Ctrl-C exit immediately while everything is loaded and there is nothing to save: a library that is being
    imported may swallow a KeyboardInterrupt."""

    def handle(_number: int, _frame: Any) -> None:
        with contextlib.suppress(RuntimeError):  # in the middle of another line
            complain("stopped")
        os._exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, handle)


def stop_on_signals(tell: Callable[[], None]) -> tuple[Callable[[], bool], Callable[[], int | None]]:
    """The first SIGINT or SIGTERM lets the run save, and tells the user; another SIGINT stops immediately.

    Returns functions that tell whether a stop was requested, and by which signal.
    """
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        # The signal may interrupt a write to the same stream, which is not reentrant.
        with contextlib.suppress(RuntimeError):
            tell()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return lambda: bool(received), lambda: received[0] if received else None
