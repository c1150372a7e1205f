"""The Ray that a run starts on this host for itself: in a directory that no other user can enter, and without
processes that outlive the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo_rl.base.temporary_directory import PrivateDirectory
from dapo_rl.cluster import ray_guard
from dapo_rl.cluster.ray_watch import vital_processes

PREFIX = "dapo-session-"
SOCKETS = Path("/tmp")
"""Ray has sockets in the directory, whose paths must be short."""
GUARD_S = 10.0


def ray_directory() -> PrivateDirectory:
    """For the files and sockets of a Ray that ends with a run. Ray lets all users write into its own directory, so that
    has to be within."""
    return PrivateDirectory(PREFIX, SOCKETS if SOCKETS.is_dir() else None)


class OwnRay:
    def __init__(self) -> None:
        """Ray itself is started by the caller, in `directory`."""
        self._private = ray_directory()
        self.directory = self._private.path / "ray"
        self._kept = False
        words = [sys.executable, "-I", "-S", ray_guard.__file__, str(os.getpid()), str(self._private.path)]
        self._guard = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,  # what ends the others of this session must not end it too
        )

    def started(self, node: Any) -> None:
        """Has all processes of Ray end with this process. `node` is Ray's own record of this host."""
        own = [info.process.pid for infos in node.all_processes.values() for info in infos]
        self._tell(*sorted({*own, *vital_processes(node).values()}))

    def keep_logs(self) -> Path:
        """Where the logs are. They stay until the next run of this user starts a Ray of its own."""
        if not self._kept:
            self._kept = True
            self._tell("keep")
        return self.directory / "session_latest" / "logs"

    def close(self) -> None:
        """Ray has been shut down."""
        self._private.close(keep=self._kept)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def _tell(self, *words: Any) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it; `close` does the rest
            print(*words, file=self._guard.stdin, flush=True)
