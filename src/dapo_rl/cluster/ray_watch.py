"""Notices that a process of Ray has ended without which a run cannot go on.

Ray's client library then ends the process that uses it: at its next call if the raylet is gone, and after a minute if
the GCS is. It does so in C++, with exit code 1 and no exception, so nothing can be caught, and the connection cannot be
made again. A thread that waits for the end of these processes is sooner: it records why the run ends, says so in one
line, and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_rl.base.streams import complain, release_streams
from dapo_rl.cluster.ray_guard import Process
from dapo_rl.errors import RayLostError

LAST_WORDS_S = 5.0
"""Seconds for recording the failure."""
AGENTS = {"dashboard agent": (b"DashboardAgent", b"dashboard/agent.py"), "runtime-env agent": (b"RuntimeEnvAgent",)}
"""How the raylet's agents are called; it ends itself if one of them does."""

_recorders: list[Callable[[RayLostError], None]] = []


@contextmanager
def if_ray_ends(record: Callable[[RayLostError], None]) -> Iterator[None]:
    """`record` is called, in another thread, before Ray's end ends this process."""
    _recorders.append(record)
    try:
        yield
    finally:
        _recorders.remove(record)


class RayWatch:
    """Watches the processes on this host of the Ray that this process is connected to. Does nothing on systems that
    cannot wait for any process (other than Linux)."""

    def __init__(self, node: Any, logs: Callable[[], str]) -> None:
        """`node` is Ray's own record of this host; `logs` says where the logs are."""
        self._logs = logs
        self._woken, self._wake = os.pipe()
        processes = []
        for name, pid in vital_processes(node).items():
            with contextlib.suppress(ProcessLookupError):
                processes.append((name, Process(pid)))
        self._thread = threading.Thread(target=self._run, args=[processes], name="ray-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before Ray's own, which ends it

    def close(self) -> None:
        """Ray may end now."""
        atexit.unregister(self.close)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._thread.join()
            os.close(self._woken)

    def _run(self, processes: Sequence[tuple[str, Process]]) -> None:
        poll = select.poll()
        poll.register(self._woken)
        names: dict[int, str] = {}
        for name, process in processes:
            if process.descriptor is not None:
                names[process.descriptor] = f"{name}, process {process.pid},"
                poll.register(process.descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        if self._woken in ready:
            for descriptor in names:
                os.close(descriptor)
            return
        why = f"{names[ready[0]]} was killed or crashed"
        then = "continue with --resume" if _recorders else "start again"  # a run that exists records it
        _exit(RayLostError(f"Ray has ended, because {why}; {then}, or look for the cause in {self._logs()}"))


def vital_processes(node: Any) -> dict[str, int]:
    pids = {}
    if gcs := node.all_processes.get("gcs_server"):
        pids["its GCS"] = gcs[0].process.pid
    if raylet := _listener(node.raylet_socket_name):
        pids["its raylet"] = raylet
        pids |= {f"its {name}": pid for name, pid in _agents(raylet).items()}
    return pids


def _exit(error: RayLostError) -> None:
    """Ends this process as the error would."""
    hurry = threading.Timer(LAST_WORDS_S, os._exit, [error.exit_code])
    hurry.daemon = True
    hurry.start()
    for record in list(_recorders):
        with contextlib.suppress(Exception):
            record(error)
    complain(str(error))
    release_streams()
    os._exit(error.exit_code)


def _listener(path: str) -> int | None:
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None


def _agents(raylet: int) -> dict[str, int]:
    found = {}
    for children in Path(f"/proc/{raylet}/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                for name, signs in AGENTS.items():
                    if any(sign in command for sign in signs):
                        found[name] = int(pid)
    return found
