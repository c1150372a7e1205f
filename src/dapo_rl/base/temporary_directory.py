"""Temporary directories that only one process uses, and which do not stay behind if it is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dapo_rl.base.lock import acquire
from dapo_rl.errors import UserError

YOUNG_S = 60.0
"""Its owner may not have locked a directory that is younger."""


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
