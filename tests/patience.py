"""Waiting for what must come, on a machine that may be slow."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600
"""Not how long something takes, but how long a machine that has other work may take for it."""


def wait_until(holds: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """`seconds` is given where a test is about how soon something comes."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"it did not come within {seconds} s"
        time.sleep(0.1)


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ends while it is read
        return False


def end_processes_in(folder: Path) -> None:
    """Kills the processes that work in a folder, so that a test that failed leaves none behind."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            at = Path(os.readlink(process / "cwd"))
        except OSError:  # it has ended
            continue
        if at.is_relative_to(folder) and int(process.name) != os.getpid():
            os.kill(int(process.name), signal.SIGKILL)
