"""Files that are whole or not there, whatever interrupts the writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path to write to; when the block ends well, what was written there takes the place of `path`."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    # The new name is durable only once its directory is.
    sync(path.parent)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Readers see the old content or the new, never a part, even after a crash."""
    with beside(path) as draft:
        draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Returns once a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
