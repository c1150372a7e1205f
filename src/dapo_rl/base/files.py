"""Files that are whole or not there, whatever interrupts the writing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = 32 << 20
"""A disk with fewer bytes to spare is why what was being written was not."""


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


@contextmanager
def directory_beside(path: Path, old: Path | None = None) -> Iterator[Path]:
    """A new directory to fill; when the block ends well, it takes the place of `path`.

    A directory that is not empty cannot be replaced in one go: the one before is first renamed to `old`, and goes
    once the new one has its name.
    """
    draft = path.with_name(f".{path.name}.part")
    old = old or path.with_name(f".{path.name}.old")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
        sync_tree(draft)
        if path.exists():
            if old.exists():  # left by a crash, and not needed while `path` is there
                remove_directory(old)
            path.rename(old)
        draft.rename(path)
    except Exception as error:
        full = shutil.disk_usage(draft.parent).free < FULL
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(draft, ignore_errors=True)
        if full:  # torch and safetensors say it in words of their own, or not at all
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    sync(path.parent)
    if old.exists():
        remove_directory(old)


def remove_directory(path: Path) -> None:
    """Under its own name it is whole or gone, whatever interrupts the removal. What a link leads to stays."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name.lstrip('.')}.gone")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    shutil.rmtree(gone)


def remove_leftovers(directory: Path) -> None:
    """What a crash left of writing and removing."""
    for kind in ("part", "tmp", "gone"):
        for path in directory.glob(f".*.{kind}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


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


def sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        sync(path)
