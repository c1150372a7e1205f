"""Starts `dapo` in a new process whose output goes to a log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO


def dapo_command(*words: str) -> list[str]:
    """The command line of `dapo` with this Python, which does not import from the working directory."""
    return [sys.executable, "-P", "-m", "dapo_rl.cli", *words]


def start_logged(
    command: Sequence[str], log: BinaryIO, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Neither Ctrl-C nor a closed terminal reaches the process."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )
