"""Hashes a file while it is written, so that it need not be read again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

IsCancelled = Callable[[], bool]
Digests = Mapping[str, str]
"""The SHA-256 of files, by their paths in a directory."""
DeferredWrite = Callable[[IsCancelled], Digests]
"""Writes a part's large files in the background and returns their hashes."""


class CancelledError(Exception):
    """A file is no longer wanted."""


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashingFile:
    """A binary file that is written from the beginning to the end."""

    def __init__(self, file: IO[bytes], is_cancelled: IsCancelled) -> None:
        self._file, self._is_cancelled = file, is_cancelled
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Raises a CancelledError if the file is no longer wanted."""
        if self._is_cancelled():
            raise CancelledError
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def hashing(path: Path, is_cancelled: IsCancelled = lambda: False) -> Iterator[HashingFile]:
    with path.open("wb") as file:
        yield HashingFile(file, is_cancelled)
