"""Ray's worker processes for tests: forks of a server that has imported everything but Ray, because to import takes
longer than most tests.

The server listens at a socket that it gets from the tests. Ray starts this file as the program of a worker
(`worker_path`); it hands its arguments, environment and streams to the server and ends, and a fork of the server
becomes the worker. To Ray, which knows workers by their connection and the process id that they tell, it is like any
other. Ray itself is imported in the fork: it reads the environment at that time. Runs of `dapo` in tests have Ray's own
workers.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys

SOCKET = "DAPO_TEST_RAY_WORKERS"
"""The environment variable with the address of the socket."""
PRELOADED = (
    "dapo_rl.cluster.build_engines",
    "dapo_rl.cluster.build_policy",
    "dapo_rl.cluster.engine_actor",
    "dapo_rl.cluster.policy_worker",
    "dapo_rl.engines.native.engine",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "google.protobuf.json_format",  # Ray imports these
    "jsonschema",
    "requests",
    "plain_ranks",
    "rank_parts",
    "stepping_engine",
)
_LENGTH = struct.Struct("<Q")


def hand_over() -> None:
    """Has the server become this worker."""
    words = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
    message = json.dumps(words).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([_LENGTH.pack(len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(message)
        server.recv(1)  # the end, after the fork


def serve(listening: socket.socket) -> None:
    """Forks a process for each worker, in which it returns; in the server itself it never does."""
    tests = os.getppid()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker then copies no page of these
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    listening.settimeout(1)
    while os.getppid() == tests:
        try:
            asking, _ = listening.accept()
        except TimeoutError:
            continue
        asking.settimeout(None)
        header, streams, _, _ = socket.recv_fds(asking, _LENGTH.size, 3)
        with asking.makefile("rb") as message:
            words = json.loads(message.read(_LENGTH.unpack(header)[0]))
        assert len(os.listdir("/proc/self/task")) == 1, "the server has threads and must not fork"
        assert "ray" not in sys.modules
        if os.fork() == 0:
            listening.close()
            asking.close()
            _become(words, streams)
            return
        asking.close()
        for fd in streams:
            os.close(fd)
    os._exit(0)


def _become(words: dict, streams: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgrp()  # Ray ends what a worker leaves in its process group
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(words["cwd"])
    os.environ.clear()
    os.environ.update(words["env"])
    sys.argv[1:] = words["argv"]


def main() -> None:
    if len(sys.argv) > 2:
        hand_over()
        return
    gc.disable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
