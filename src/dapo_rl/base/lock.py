"""Directories that only one process at a time uses."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from dapo_rl.errors import UserError

if sys.platform != "win32":
    import fcntl

NAME = ".lock"
_held: set[str] = set()
"""Directories locked by this process; the system's locks work between processes only."""


_ADVICE = "wait until it is done, or name another directory with --run"


def acquire(directory: Path) -> Callable[[], None]:
    """Locks a directory for this process; call the result to release it.

    The system releases the lock however the process ends, and children do not inherit it. On platforms and file
    systems without such locks, there is none.
    """
    name = os.path.realpath(directory)
    if name in _held:
        raise UserError(f"{directory}: in use by another trainer of this process; {_ADVICE}")
    descriptor = _acquire(directory)
    _held.add(name)

    def release() -> None:
        _held.discard(name)
        if descriptor is not None:
            (directory / NAME).unlink(missing_ok=True)
            os.close(descriptor)

    return release


def _acquire(directory: Path) -> int | None:
    if sys.platform == "win32":
        return None
    path = directory / NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
                return descriptor
        except OSError as error:
            owner = os.pread(descriptor, 300, 0).decode(errors="replace").split()
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
                raise UserError(f"{directory}: in use by {who}; {_ADVICE}") from None
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        os.close(descriptor)  # the previous owner removed the file between our open and our lock


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
