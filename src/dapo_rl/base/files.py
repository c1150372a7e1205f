"""Atomic writes: after an interruption, a file or directory is complete or missing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = 32 << 20
"""With fewer free bytes than this, a failed write is taken for a full disk."""


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` if the block succeeds."""
    if path.is_dir():  # `.` has no name, and the message would be about the draft
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = path.with_name(f".{path.name}.tmp")
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    # The rename is durable only once the directory is synced.
    sync(path.parent)


@contextmanager
def directory_beside(path: Path, old: Path | None = None) -> Iterator[Path]:
    """A new directory to fill; it replaces `path` if the block succeeds.

    A directory that is not empty cannot be replaced atomically: the previous one is renamed to `old`, and removed once
    the new one has its name.
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
            if old.exists():  # left by a crash; not needed while `path` exists
                remove_directory(old)
            path.rename(old)
        draft.rename(path)
    except Exception as error:
        full = shutil.disk_usage(draft.parent).free < FULL
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(draft, ignore_errors=True)
        if full:  # torch and safetensors report it in their own way, or not at all
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    sync(path.parent)
    if old.exists():
        remove_directory(old)


def remove_directory(path: Path) -> None:
    """Removes a directory so that, after an interruption, it is complete or gone. A link's target is not removed."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name.lstrip('.')}.gone")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    shutil.rmtree(gone)


def remove_leftovers(directory: Path) -> None:
    """Removes files that a crash left behind while writing or removing."""
    for kind in ("part", "tmp", "gone"):
        for path in directory.glob(f".*.{kind}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def atomic_write(path: Path, content: bytes | str) -> None:
    """Readers see the old content or the new, never a part of it, even after a crash."""
    with beside(path) as draft:
        draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Returns once a file or directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        sync(path)
