"""Ends what is left of a run's own Ray when the driver has ended, however that was: `ray_guard.py DRIVER DIRECTORY`.

The driver writes to its standard input: the ids of Ray's processes, which are killed at the end, and `keep` if the
directory is not to be removed. It is a process of its own, because a driver that is killed can do nothing, and uses the
standard library alone, to start quickly.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 5


class Process:
    """A process that is not mistaken for another that gets its id later, where the system can tell (Linux)."""

    def __init__(self, pid: int) -> None:
        """Raises a ProcessLookupError if there is none."""
        self.pid = pid
        self.descriptor: int | None = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it has ended, but not for long."""
        if self.descriptor is not None:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            poll.poll(WAIT_S * 1000)


def main() -> None:
    driver, directory = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the driver
        signal.signal(number, signal.SIG_IGN)
    keep, processes = listen(driver)
    processes += starting_in(directory)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()  # it may still write
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)


def listen(driver: int) -> tuple[bool, list[Process]]:
    """Until the driver has ended or closes the pipe. Its end alone may not close it: a process that it has forked has a
    copy."""
    keep, rest = False, b""
    processes: list[Process] = []
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        if (descriptor := Process(driver).descriptor) is not None:
            poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 not in ready or not (read := os.read(0, 65536)):
            return keep, processes
        *lines, rest = (rest + read).split(b"\n")
        for word in b" ".join(lines).split():
            if word == b"keep":
                keep = True
                continue
            with contextlib.suppress(ProcessLookupError):
                processes.append(Process(int(word)))


def starting_in(directory: str) -> Iterator[Process]:
    """The workers that Ray has begun to start, which do not notice yet that it has ended."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = command.read_bytes()
            if b"default_worker.py" in words and f"{directory}/".encode() in words:
                yield Process(int(command.parent.name))


if __name__ == "__main__":
    main()
