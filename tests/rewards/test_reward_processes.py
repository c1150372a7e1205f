"""Hostile and unlucky verifiers: fork servers that die, replies that are none, shared memory, and daemons."""

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import shared_memory

import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import VerifierPool
from dapo_rl.rewards.service import Reply, decode_reply, encode_reply
from dapo_rl.types import Prompt, Trajectory, Verdict
from dapo_rl.workers import limits, processes, supervisor
from dapo_rl.workers import worker as worker_module
from dapo_rl.workers.worker import CorruptReplyError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="what is tested is Linux's")]

PATIENCE_S = 20
PROMPT = Prompt("p7", "2+3=", (1, 2), "5")
GONE = r"the process that forks its workers .* has ended.*reward\.workers or reward\.memory_mb"


def settings(**given):
    return RewardSettings(**{"workers": 1, "timeout_s": PATIENCE_S, **given})


def samples(*texts):
    return [Trajectory((), (), text, "stop") for text in texts]


def is_alive(pid):
    """Whether there is such a process, and it is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ends while it is read
        return False


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def by_text(act, **given):
    """A pool whose verifier acts on a text that is no number, and scores a number as what it is."""

    def verifier(prompt, samples):
        scores = [float(s.text) if s.text.lstrip("-").isdigit() else act(s.text) for s in samples]
        return [Verdict(1.0 if score is None else score, True, "correct") for score in scores]

    return VerifierPool(verifier, settings(**given))


def scores(pool, *texts):
    return [verdict.score for verdict in pool(PROMPT, samples(*texts))]


# The fork server's death.


def test_a_fork_server_that_is_killed_is_replaced_between_calls():
    with by_text(None) as pool:
        for n in range(6):  # more often than it may die in a row
            assert scores(pool, str(n)) == [n]
            before = pool.pids
            os.kill(before[0], signal.SIGKILL)
            wait_until(lambda before=before: not any(map(is_alive, before)))
        assert scores(pool, "7") == [7]
        assert not set(before) & set(pool.pids)


def test_a_call_whose_worker_dies_with_its_fork_server_is_made_again(tmp_path):
    began = tmp_path / "began"

    def act(text):
        if not began.exists():
            began.touch()
            time.sleep(1000)
        return 5.0

    with by_text(act) as pool:
        ticket = pool.submit(PROMPT, samples("act"))
        wait_until(began.exists)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert ticket.result(timeout=PATIENCE_S)[0].score == 5


def test_all_calls_in_flight_are_made_again(tmp_path):
    def act(text):
        if not (tmp_path / text).exists():
            (tmp_path / text).touch()
            time.sleep(1000)
        return 5.0

    with by_text(act, workers=3) as pool:
        tickets = [pool.submit(PROMPT, samples(name)) for name in ("a", "b", "c")]
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert [ticket.result(timeout=PATIENCE_S)[0].score for ticket in tickets] == [5, 5, 5]


def kill_the_fork_server(text):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def test_a_call_that_kills_its_fork_server_is_an_error_and_the_others_go_on():
    with by_text(kill_the_fork_server) as pool:
        for n in range(4):
            (verdict,) = pool(PROMPT, samples("kill"))
            assert (verdict.status, verdict.score) == ("error", -1)
            assert "the process that forks the verifier's workers died during the call, twice" in verdict.detail
            assert scores(pool, str(n)) == [n]


def test_fork_servers_that_keep_dying_end_the_run():
    with by_text(kill_the_fork_server) as pool:
        assert pool(PROMPT, samples("kill"))[0].status == "error"
        for _ in range(2):
            with pytest.raises(UserError, match=GONE) as caught:
                pool(PROMPT, samples("kill"))
            assert "\n" not in str(caught.value)


def test_without_the_supervisor_there_is_an_error_and_no_hanging():
    with by_text(None) as pool:
        assert scores(pool, "1") == [1]
        pids = pool.pids
        os.kill(pool._workers.supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)))
        with pytest.raises(UserError, match=GONE):
            pool(PROMPT, samples("1"))


def test_a_warm_up_that_kills_its_process_ends_the_run():
    class Verifier:
        def warm_up(self):
            os._exit(3)

        def __call__(self, prompt, samples):
            return [Verdict(1.0, True, "correct")]

    with VerifierPool(Verifier(), settings()) as pool:
        assert pool(PROMPT, samples("1"))[0].status == "error"
        with pytest.raises(UserError, match=GONE):
            pool(PROMPT, samples("1"))


def test_a_worker_that_dies_between_two_calls_costs_no_call():
    with by_text(None) as pool:
        for n in range(5):
            assert scores(pool, str(n)) == [n]
            worker = pool.pids[1]
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda worker=worker: not is_alive(worker))


def test_a_worker_that_dies_and_leaves_a_copy_of_its_socket_is_noticed(tmp_path):
    def act(text):
        daemonize(tmp_path / text)
        os._exit(7)

    with by_text(act, timeout_s=1000) as pool:
        verdict = pool.submit(PROMPT, samples("a")).result(timeout=PATIENCE_S)[0]
        assert (verdict.status, verdict.detail) == ("error", "the verifier's process exited with code 7")
        assert not is_alive(pid_in(tmp_path / "a"))


def test_a_worker_that_dies_at_its_start_is_an_error_of_its_call(monkeypatch):
    monkeypatch.setattr(supervisor, "work", lambda *_: os._exit(1))
    with by_text(None) as pool:
        (verdict,) = pool(PROMPT, samples("1"))
        assert (verdict.status, "died at its start" in verdict.detail) == ("error", True)


def test_workers_are_the_first_to_go_when_memory_is_short():
    with by_text(lambda text: float(open("/proc/self/oom_score_adj").read())) as pool:
        assert scores(pool, "read") == [1000]


# Replies.


def test_a_verifier_that_forks_and_returns_twice_replies_once():
    def fork(text):
        if os.fork() == 0:
            return -7.0
        return 7.0

    with by_text(fork) as pool:
        for n in range(20):
            assert scores(pool, "fork", str(n)) == [7, n]
            assert scores(pool, str(n), str(-n)) == [n, -n]


def test_a_copy_that_raises_or_exits_does_not_reply_either():
    def fork(text):
        if os.fork() == 0:
            sys.exit(0) if text == "exit" else fail()
        return 7.0

    def fail():
        raise ValueError("the copy")

    with by_text(fork) as pool:
        for n in range(10):
            assert scores(pool, "exit", str(n)) == [7, n]
            assert scores(pool, "raise", str(n)) == [7, n]


def test_a_warm_up_that_forks_and_returns_twice():
    class Verifier:
        def warm_up(self):
            os.fork()

        def __call__(self, prompt, samples):
            return [Verdict(float(sample.text), True, "correct") for sample in samples]

    with VerifierPool(Verifier(), settings()) as pool:
        assert [scores(pool, str(n)) for n in range(10)] == [[n] for n in range(10)]


def own_socket():
    """The worker's end of its socket, as user code could find it: the newest, since a run may have others."""
    found = []
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            end = socket.socket(fileno=os.dup(fd))
            if end.family == socket.AF_UNIX and end.type == socket.SOCK_STREAM:
                found.append(end)
    return max(found, key=lambda end: os.fstat(end.fileno()).st_ino)


def frame(number, body, magic=b"dapo", length=None):
    return struct.pack("<4sQQ", magic, number, len(body) if length is None else length) + body


ONE = [1.0, True, "correct", None, ""]
FORGED = json.dumps(["verdicts", [[9.0, True, "correct", None, ""]], ["", ""], False]).encode()
RUBBISH = {
    "text": b"Hello, who is there?" * 100,
    "a length of 2**60": frame(1, b"", length=2**60),
    "a length of all ones": frame(1, b"", length=2**64 - 1),
    "a length just above the limit": frame(1, b"", length=(64 << 20) + 1),
    "no JSON": frame(1, b"\x80\x04K\x01."),
    "not UTF-8": frame(1, b'"\xff\xfe\xff"'),
    "brackets": frame(1, b"[" * 100_000),
    "another shape": frame(1, b"{}"),
    "another kind": frame(1, json.dumps(["praise", [], ["", ""], False]).encode()),
    "too many": frame(1, json.dumps(["verdicts", [ONE] * 2, ["", ""], False]).encode()),
    "none": frame(1, json.dumps(["verdicts", [], ["", ""], False]).encode()),
    "nan": frame(1, json.dumps(["verdicts", [[float("nan"), *ONE[1:]]], ["", ""], False]).encode()),
    "fields missing": frame(1, json.dumps(["verdicts", [[]], ["", ""], False]).encode()),
    "a call to come": frame(2, FORGED),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_in_the_socket_is_an_error_of_its_call(name):
    def write(text):
        own_socket().sendall(RUBBISH[name])
        return 1.0

    with by_text(write) as pool:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (verdict,) = pool(PROMPT, samples("write"))
        assert (verdict.status, verdict.score) == ("error", -1)
        assert "the verifier's process sent something other than a reply" in verdict.detail
        assert scores(pool, "3") == [3]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 << 10  # KiB


def test_half_a_message_is_a_timeout():
    with by_text(lambda text: own_socket().sendall(frame(1, b"", length=1000)), timeout_s=0.3) as pool:
        # The reply itself fills a part of what the header promises.
        assert pool(PROMPT, samples("write"))[0].status == "timeout"
        assert scores(pool, "3") == [3]


def test_a_reply_to_an_earlier_call_is_discarded():
    def write(text):
        own_socket().sendall(frame(1, FORGED))
        return 1.0

    with by_text(write) as pool:
        assert scores(pool, "1") == [1]
        pid = pool.pids[1]
        assert scores(pool, "write") == [1]
        assert scores(pool, "2") == [2]
        assert pool.pids[1] == pid


def test_a_late_reply_of_a_thread_is_not_the_next_calls():
    def later(text):
        threading.Timer(0.05, lambda: own_socket().sendall(frame(1, FORGED))).start()
        return 1.0

    with by_text(later) as pool:
        assert scores(pool, "later") == [1]
        for n in range(20):
            assert scores(pool, str(n)) == [n]
            time.sleep(0.01)


def test_verdicts_that_are_too_large_to_send():
    def verifier(prompt, samples):
        return [Verdict(1.0, True, "correct", samples[0].text * (65 << 20))]

    with VerifierPool(verifier, settings()) as pool:
        (verdict,) = pool(PROMPT, samples("x"))
        assert (verdict.status, "returned verdicts of 65 MiB" in verdict.detail) == ("error", True)
        assert pool(PROMPT, samples(""))[0].status == "correct"


def test_a_closed_socket_is_an_error_of_its_call():
    with by_text(lambda text: os.closerange(3, 256)) as pool:
        assert pool(PROMPT, samples("close"))[0].status == "error"
        assert scores(pool, "3") == [3]


def test_nothing_in_a_reply_is_evaluated(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    import pickle

    def write(text):
        own_socket().sendall(frame(1, pickle.dumps(Evil())))
        return 1.0

    with by_text(write) as pool:
        assert pool(PROMPT, samples("write"))[0].status == "error"
    assert not (tmp_path / "made").exists()


def test_a_column_that_cannot_be_unpickled_is_an_error():
    with by_text(None) as pool:
        odd = Prompt("p", "?", (1,), columns={"odd": Unpicklable()})
        (verdict,) = pool(odd, samples("1"))
        assert (verdict.status, "cannot read the call: ValueError: odd" in verdict.detail) == ("error", True)
        assert scores(pool, "3") == [3]


class Unpicklable:
    def __reduce__(self):
        return _raise_odd, ()


def _raise_odd():
    raise ValueError("odd")


def test_replies_come_back_as_they_were():
    verdicts = [
        Verdict(0.1 + 0.2, True, "correct", "½ \ud800 \x00", "a\nb"),
        Verdict(-1e-300, False, "timeout", None, ""),
    ]
    reply = Reply("verdicts", verdicts, exhausted=True)
    assert decode_reply(bytearray(encode_reply(reply)), 2) == reply
    with pytest.raises(CorruptReplyError):
        decode_reply(bytearray(encode_reply(reply)), 3)
    fatal = Reply("fatal", [], ("line", "more"))
    assert decode_reply(bytearray(encode_reply(fatal)), 2) == fatal


# Shared memory.

KEPT = []


def keep(memory):
    """Writes to each of its pages."""
    KEPT.append(memory)
    for page in range(0, len(memory), 4096):
        memory[page] = 1


def anonymous(size):
    keep(mmap.mmap(-1, size))


def named(size):
    segment = shared_memory.SharedMemory(create=True, size=size)
    segment.unlink()
    KEPT.append(segment)
    keep(segment.buf)


def in_dev_shm(size):
    path = f"/dev/shm/dapo-test-{os.getpid()}"
    with open(path, "w+b") as file:
        os.unlink(path)
        file.truncate(size)
        keep(mmap.mmap(file.fileno(), size))


def in_children(size):
    for _ in range(3):
        if os.fork() == 0:
            anonymous(size // 3)
            time.sleep(1000)


def in_a_daemon(size):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            anonymous(size)
            time.sleep(1000)
        os._exit(0)


@pytest.mark.parametrize("allocate", [anonymous, named, in_dev_shm, in_children, in_a_daemon])
def test_shared_memory_counts(allocate, monkeypatch):
    monkeypatch.setattr(limits, "find_groups", lambda: limits.ControlGroups(None))  # it would come first

    def act(text):
        allocate(150 << 20)
        time.sleep(1000)

    with by_text(act, memory_mb=100) as pool:
        (verdict,) = pool(PROMPT, samples("take"))
        assert verdict.status == "error"
        assert "used more shared memory than reward.memory_mb allows" in verdict.detail
        assert scores(pool, "3") == [3]


@pytest.mark.parametrize("allocate", [anonymous, in_children])
def test_shared_memory_within_the_limit_is_the_verifiers_own(allocate, monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.02)

    def act(text):
        allocate(60 << 20)
        time.sleep(1)
        return 1.0

    with by_text(act, memory_mb=100) as pool:
        assert scores(pool, "take") == [1]


def test_shared_memory_of_the_run_does_not_count(monkeypatch):
    monkeypatch.setattr(supervisor, "WATCH_S", 0.02)
    with mmap.mmap(-1, 150 << 20) as ours:

        def act(text):
            keep(ours)
            time.sleep(1)
            return 5.0

        with by_text(act, memory_mb=100) as pool:
            assert scores(pool, "write") == [5]


def test_shared_memory_of_a_killed_call_is_removed():
    def act(text):
        segment = shared_memory.SharedMemory(name=text, create=True, size=1 << 20)
        segment.buf[0] = 1
        if os.fork() == 0:
            time.sleep(1000)  # it holds a copy of everything
        time.sleep(1000)

    name = f"dapo-test-{os.getpid()}"
    with by_text(act, timeout_s=0.5) as pool:
        assert pool(PROMPT, samples(name))[0].status == "timeout"
        wait_until(lambda: not os.path.exists(f"/dev/shm/{name}"))


# Daemons.


def daemonize(path):
    """Forks twice, in a session of its own, as daemons do; writes its pid."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            path.write_text(str(os.getpid()), encoding="utf-8")
            time.sleep(1000)
        os._exit(0)
    wait_until(path.exists)
    wait_until(lambda: path.read_text(encoding="utf-8"))


def pid_in(path):
    return int(path.read_text(encoding="utf-8"))


def test_a_daemon_lives_as_long_as_its_worker_and_ends_with_the_pool(tmp_path):
    with by_text(lambda text: daemonize(tmp_path / text), workers=2) as pool:
        assert scores(pool, "a") == [1]
        assert scores(pool, "1", "2") == [1, 2]
        daemon = pid_in(tmp_path / "a")
        assert is_alive(daemon)
    assert not is_alive(daemon)


def test_a_daemon_is_killed_with_its_worker_and_not_with_another(tmp_path):
    barrier = tmp_path / "both"
    barrier.mkdir()

    def act(text):
        daemonize(tmp_path / text)
        (barrier / text).touch()
        wait_until(lambda: len(list(barrier.iterdir())) == 2)  # so that each has a worker of its own
        time.sleep(1000 if text == "hangs" else 0)
        return 1.0

    with by_text(act, workers=2, timeout_s=3) as pool:
        tickets = [pool.submit(PROMPT, samples(text)) for text in ("hangs", "lives")]
        assert [ticket.result()[0].status for ticket in tickets] == ["timeout", "correct"]
        assert not is_alive(pid_in(tmp_path / "hangs"))
        assert is_alive(pid_in(tmp_path / "lives"))


def test_a_daemon_ends_with_its_fork_server(tmp_path):
    with by_text(lambda text: daemonize(tmp_path / text)) as pool:
        assert scores(pool, "a") == [1]
        before = pool.pids
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, before)))
        assert scores(pool, "1") == [1]  # by a new one
        assert not is_alive(pid_in(tmp_path / "a"))


def test_a_daemon_ends_with_a_run_that_is_killed(tmp_path):
    code = f"""
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from test_reward_processes import PROMPT, by_text, daemonize, samples
    pool = by_text(lambda text: daemonize(Path({str(tmp_path)!r}, text)))
    pool(PROMPT, samples("a"))
    print(*pool.pids, flush=True)
    time.sleep(1000)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pids = [*map(int, run.stdout.readline().split()), pid_in(tmp_path / "a")]
    assert all(map(is_alive, pids))
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_children_that_fork_on_are_all_killed(tmp_path):
    def act(text):
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                for _ in range(3):
                    os.fork()
                (tmp_path / str(os.getpid())).touch()
                time.sleep(1000)
        time.sleep(1000)

    with by_text(act, timeout_s=3) as pool:
        assert pool(PROMPT, samples("x"))[0].status == "timeout"
        pids = [int(path.name) for path in tmp_path.iterdir()]
        assert len(pids) == 40
        wait_until(lambda: not any(map(is_alive, pids)))


def test_dead_orphans_do_not_pile_up_and_a_childs_exit_code_is_not_taken_away(monkeypatch):
    monkeypatch.setattr(worker_module, "REAP_CALLS", 4)
    started = []

    def act(text):
        if text == "start":
            started.append(subprocess.Popen(["sh", "-c", "exit 7"]))
        if text == "orphan":
            os.system("true &")
        if text == "wait":
            return float(started.pop().wait())
        return 0.0

    def zombies(parent):
        states = [entry for entry in processes._all_processes() if entry[1:] == (b"Z", parent)]
        return len(states)

    with by_text(act) as pool:
        assert scores(pool, "start") == [0]
        assert scores(pool, "wait") == [7]
        for _ in range(40):
            assert scores(pool, "orphan") == [0]
        assert zombies(pool.pids[1]) < 20
        # A child that is waited for in the next call.
        assert scores(pool, "start") == [0]
        assert scores(pool, "wait") == [7]


def test_a_child_has_ended_or_not_and_stays_to_be_waited_for(monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as child:
        assert not processes.has_ended(child.pid)
        child.kill()
        wait_until(lambda: processes.has_ended(child.pid))
        assert processes.has_ended(child.pid)
        monkeypatch.delattr(os, "waitid")
        assert not processes.has_ended(child.pid)  # nobody can tell
        assert child.wait() == -signal.SIGKILL
