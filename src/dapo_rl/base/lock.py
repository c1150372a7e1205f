"""Directories that only one process at a time uses: those of runs, and temporary ones, which do not stay behind."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dapo_rl.errors import UserError

if sys.platform != "win32":
    import fcntl

NAME = ".lock"
YOUNG_S = 60.0
"""Its owner may not have locked a directory that is younger."""
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


class PrivateDirectory:
    """A directory with mode 0700, locked by this process until `close`.

    One that a killed process has left behind is removed when the next is made, by the same user and with the same
    prefix.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(parent or tempfile.gettempdir())
        _remove_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._release: Callable[[], None] = acquire(self.path)

    def close(self, *, keep: bool = False) -> None:
        """Removes the directory; `keep` leaves that to the next one."""
        release, self._release = self._release, lambda: None
        release()
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)


def _remove_abandoned(prefix: str, parent: Path) -> None:
    for path in parent.glob(f"{prefix}*"):
        try:
            stat = path.lstat()
            if stat.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
                continue
            if time.time() - stat.st_mtime < YOUNG_S:
                continue
            acquire(path)()
        except (OSError, UserError):  # it is in use, or gone
            continue
        shutil.rmtree(path, ignore_errors=True)
