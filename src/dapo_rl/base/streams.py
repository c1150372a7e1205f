"""The command's output: streams that a shell or a reader may have closed, and errors in one line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

from dapo_rl.base.quote import printable

CLOSED_PIPE = 141
"""The exit code that shells report for SIGPIPE."""


def open_streams() -> None:
    """Replaces streams that the shell has closed (`>&-`), which are None in Python."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process


def release_streams() -> None:
    """Flushes the streams; a failed flush would otherwise be repeated, with another error, when Python exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def nobody_reads(stream: TextIO) -> bool:
    """Whether the reading end of a pipe is closed. A broken pipe to one of our own processes is a bug instead."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # not on every platform, and not for every stream
        return False


def complain(line: str, more: str = "") -> None:
    """Prints one line, and `more` below it. Control characters are escaped: text may come from data or models."""
    with contextlib.suppress(BrokenPipeError):
        print(f"dapo: {printable(' '.join(line.split()))}", file=sys.stderr)
        if more:
            print(printable(more), file=sys.stderr)
