"""Starts the Ray cluster of a Slurm job: `python -m dapo_rl.launch.ray_nodes free | start … | wait ADDRESS NODES`.

`free` prints the address of this host and two free ports. `wait` returns when that many nodes have joined, or for 0,
when the head answers. It gives up after five minutes, or when a process that starts Ray has ended (further arguments:
the ids of these processes). `start` is `ray start --block` in a temporary directory of its own, which it removes at the
end, also when the job is cancelled: no other process can be started then.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from dapo_rl.cluster.local_ray import ray_directory
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.errors import UserError

PATIENCE_S = 300.0
POLL_S = 0.2


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["free"]:
                print(*free_ports(2))
            case ["start", *words]:
                sys.exit(start_ray(words))
            case ["wait", address, count, *processes]:
                wait_for_nodes(address, int(count), [int(each) for each in processes])
            case _:
                sys.exit(__doc__)
    except UserError as error:
        print(f"dapo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def free_ports(count: int) -> list[str | int]:
    """The address of this host that others reach, as Ray finds it, and ports that are free now."""
    ip = import_ray().util.get_node_ip_address()
    with ExitStack() as sockets:
        servers = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind((ip, 0))
        return [ip, *(server.getsockname()[1] for server in servers)]


def start_ray(words: Sequence[str]) -> int:
    """Runs `ray start --block` until it ends, or until a signal ends it; its exit code."""
    directory, signals = ray_directory(), list[int]()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: signals.append(number))
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *words]
        process = subprocess.Popen([*command, f"--temp-dir={directory.path / 'ray'}"])
        while (code := process.poll()) is None:
            if signals:
                process.terminate()
                code = process.wait()
                break
            time.sleep(POLL_S)
        return code if code >= 0 else 128 - code
    finally:
        directory.close()


def wait_for_nodes(address: str, count: int, processes: Sequence[int], patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    host, _, port = address.rpartition(":")
    while not _answers(host, int(port)):
        _check(0, count, processes, end)
        time.sleep(POLL_S)
    if count == 0:
        return
    ray = import_ray()
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    try:
        while (alive := sum(node["Alive"] for node in ray.nodes())) < count:
            _check(alive, count, processes, end)
            time.sleep(POLL_S)
    finally:
        ray.shutdown()


def _check(alive: int, count: int, processes: Sequence[int], end: float) -> None:
    gone = [process for process in processes if not _is_there(process)]
    if gone or time.monotonic() > end:
        why = "Ray ended while it started" if gone else "they took too long"
        raise UserError(f"{alive} of {count} nodes joined Ray: {why}; see ray-JOB.log in the run directory")


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
