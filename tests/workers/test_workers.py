"""Workers that keep state over several calls, as an environment does over the turns of an episode."""

import contextlib
import errno
import os
import signal
import time

import pytest

from dapo_rl.workers import Service, Supervisor, WorkerClient, WorkerFailedError
from dapo_rl.workers import supervisor as supervising

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork there are no processes"),
]


OTHER_SIGNALS = (b"SIGHUP", b"SIGINT", b"SIGTERM", b"SIGUSR1")
"""Whose wait statuses are small numbers, as other codes may be."""


@pytest.fixture
def supervisor():
    turns = []

    def answer(body, is_short):
        turns.append(bytes(body))
        if body == b"hang":
            time.sleep(1000)
        if body == b"exit":
            os._exit(3)
        if body.startswith(b"SIG"):
            number = signal.Signals[body.decode()]
            with contextlib.suppress(OSError):  # SIGKILL has no other
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            time.sleep(1000)
        return b" ".join([*turns, str(os.getpid()).encode()])

    supervisor = Supervisor(Service(answer, memory_mb=256, name="environment", section="envs"))
    yield supervisor
    supervisor.close()


def test_a_worker_remembers_earlier_calls_until_it_is_killed(supervisor):
    first, second = WorkerClient(supervisor, 20.0), WorkerClient(supervisor, 20.0)
    assert first.call(b"a", bytes).split()[:-1] == [b"a"]
    assert second.call(b"x", bytes).split()[:-1] == [b"x"]
    assert first.call(b"b", bytes).split() == [b"a", b"b", str(first.worker.pid).encode()]
    pid = first.worker.pid
    first.kill()
    assert not os.path.exists(f"/proc/{pid}")
    assert first.call(b"c", bytes).split()[:-1] == [b"c"]
    assert second.call(b"y", bytes).split()[:-1] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"hang", "timeout", "killed: not decided within 0.3 s"),
        (b"exit", "error", "the environment's process exited with code 3"),
        (b"SIGKILL", "error", r"the environment's process was killed by SIGKILL \(is the machine out of memory\?\)$"),
        *((name, "error", f"the environment's process was killed by {name.decode()}$") for name in OTHER_SIGNALS),
    ],
)
def test_a_failed_call_says_what_happened(supervisor, body, status, detail):
    client = WorkerClient(supervisor, 0.3 if body == b"hang" else 20.0)
    with pytest.raises(WorkerFailedError, match=detail) as caught:
        client.call(body, bytes)
    assert caught.value.status == status
    assert client.worker is None


def test_a_call_that_depends_on_state_is_not_made_again_in_a_new_worker(supervisor):
    client = WorkerClient(supervisor, 20.0)
    client.call(b"a", bytes)
    os.kill(supervisor.server_pid, signal.SIGKILL)
    while not client.worker.has_ended():
        time.sleep(0.01)
    with pytest.raises(WorkerFailedError, match="has ended since the last call"):
        client.call(b"b", bytes, retry=False)
    assert client.call(b"c", bytes).split()[:-1] == [b"c"]


@pytest.mark.parametrize(
    ("server_ended", "what"), [(False, "a worker for the environment"), (True, "the environment's processes")]
)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_process_that_cannot_be_forked_is_an_error_of_the_system(supervisor, monkeypatch, number, server_ended, what):
    client, asked = WorkerClient(supervisor, 20.0), supervising._request

    def request(channel, *arguments):
        return asked(channel, *arguments) if server_ended and channel is supervisor._server else -number

    monkeypatch.setattr(supervising, "_request", request)
    if server_ended:
        os.kill(supervisor.server_pid, signal.SIGKILL)
    with pytest.raises(OSError, match=f"{what} cannot be forked: {os.strerror(number)}") as caught:
        client.call(b"a", bytes)
    assert caught.value.errno == number
    monkeypatch.undo()
    assert client.call(b"b", bytes).split()[:-1] == [b"b"], "later it may be possible"


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_waits_for_the_supervisor_and_kills_one_that_does_not_end(supervisor, hangs):
    client = WorkerClient(supervisor, 20.0)
    client.call(b"a", bytes)
    if hangs:
        os.kill(supervisor.pid, signal.SIGSTOP)
    began = time.monotonic()
    supervisor.close(patience_s=0.2)
    assert time.monotonic() - began < 10
    with pytest.raises(ChildProcessError):  # it is not left as a zombie
        os.waitpid(supervisor.pid, os.WNOHANG)
