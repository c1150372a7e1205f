"""Reads untrusted files up to a size limit: a path may name an endless device or a pipe without a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
_HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Paths of standard input and of a shell's `<(command)`: pipes that have a writer."""


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file. Raises OSError if it has more than `most` bytes or is not a file."""
    check_is_file(path)
    parts: list[bytes] = []
    size = 0
    with path.open("rb") as file:
        while part := file.read(min(_CHUNK, most + 1 - size)):
            parts.append(part)
            size += len(part)
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {_written(most)}", str(path))
    return b"".join(parts)


def open_regular(path: str) -> BinaryIO:
    """Opens a regular file; a pipe or device that has replaced it is rejected without blocking."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("is not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_is_file(path: Path) -> None:
    """Raises OSError if a path is not a file. Even opening a pipe may block forever."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(_HANDED_OVER)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def _written(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
