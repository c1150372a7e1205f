"""The home directory in paths of users."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with a home for `~`. `~name` stays as it is where there is no such user, and is missing then."""
    return Path(os.path.expanduser(path))
