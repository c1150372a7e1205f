"""The verifier's processes: limits that hold, crashes that stay theirs, and nothing left behind."""

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError

import forked
import numpy as np
import pytest
from test_reward_processes import PATIENCE_S, is_alive, settings, wait_until

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import (
    CombinedVerifier,
    CustomVerifier,
    ExactVerifier,
    GymVerifier,
    MathVerifier,
    VerifierPool,
)
from dapo_rl.rewards import (
    pool as pool_module,
)
from dapo_rl.rewards.pool import worker_count
from dapo_rl.types import Prompt, Trajectory, Verdict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="without fork there are no processes"),
]

LIMIT_S = 0.75
PROMPT = Prompt("p7", "2+3=", (1, 2), "5", "sums", None, {"level": 3})


def samples(*texts):
    return [Trajectory((7, 8), (-0.1, -0.2), text, "stop") for text in texts]


class Plain:
    """A verifier made of a function of the sample's text; it judges a group at once unless told otherwise."""

    def __init__(self, judge, per_sample=False):
        self.judge = judge
        self.per_sample = per_sample

    def __call__(self, prompt, samples):
        return [Verdict(float(self.judge(sample.text)), True, "correct") for sample in samples]


def test_a_pool_judges_as_its_verifier_does():
    group = samples("Answer: 5", "Answer: 6", "five", r"Answer: \frac{\sqrt{100}}{2}", "Answer: 5.0")
    verifier = MathVerifier(settings())
    with VerifierPool(verifier, settings()) as pool:
        verdicts = pool(PROMPT, group)
        assert verdicts == verifier(PROMPT, group)
    assert [v.status for v in verdicts] == ["correct", "wrong", "unparseable", "wrong", "correct"]


def test_verdicts_come_in_order_from_many_tickets():
    with VerifierPool(Plain(float), settings(workers=3)) as pool:
        tickets = [pool.submit(PROMPT, samples(str(n), str(-n))) for n in range(200)]
        assert [[v.score for v in t.result()] for t in tickets] == [[n, -n] for n in range(200)]
        assert len(pool.pids) == 1 + 3


def test_the_caller_goes_on_while_verdicts_are_computed():
    with VerifierPool(Plain(lambda text: time.sleep(0.3) or 1), settings()) as pool:
        start = time.monotonic()
        ticket = pool.submit(PROMPT, samples("x"))
        assert not ticket.done()
        assert time.monotonic() - start < 0.2
        assert ticket.result()[0].score == 1


def test_workers_work_at_the_same_time(tmp_path):
    def meet(text):
        (tmp_path / text).touch()
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        return 1

    with VerifierPool(Plain(meet), settings(workers=3)) as pool:
        tickets = [pool.submit(PROMPT, samples(name)) for name in "abc"]
        assert [t.result()[0].status for t in tickets] == ["correct"] * 3


def test_an_empty_group():
    with VerifierPool(Plain(float, per_sample=True), settings()) as pool:
        assert pool(PROMPT, []) == []


def endless_sympy(text):
    import sympy

    x, y = sympy.symbols("x y")
    return sympy.expand((x + y + sympy.sqrt(x * y)) ** 4000)


def ignore_everything(text):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1)


def many_threads(text):
    for _ in range(4):
        threading.Thread(target=lambda: sum(range(10**12))).start()
    return sum(range(10**12))


ENDLESS = {
    "power tower": lambda text: 9**9**9**9,
    "regular expression": lambda text: re.fullmatch("(a+)+b", "a" * 60) is not None,
    "sympy": endless_sympy,
    "a loop in C": lambda text: sum(range(10**12)),
    "sort": lambda text: sorted(range(30_000_000), key=lambda n: -n * n % 1_000_003)[0],
    "pause": lambda text: ctypes.CDLL(None).pause(),
    "no signal is heard": ignore_everything,
    "threads": many_threads,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_killed(name):
    judge = ENDLESS[name]
    with VerifierPool(
        Plain(lambda text: judge(text) if text == "hang" else 1.0), settings(timeout_s=LIMIT_S, memory_mb=8192)
    ) as pool:
        assert pool(PROMPT, samples("fine"))[0].score == 1
        _, before = pool.pids
        start = time.monotonic()
        (verdict,) = pool(PROMPT, samples("hang"))
        took = time.monotonic() - start
        assert (verdict.status, verdict.correct, verdict.score) == ("timeout", False, -1)
        assert verdict.detail == "killed: not decided within 0.75 s"
        assert LIMIT_S <= took < LIMIT_S + 3
        assert not is_alive(before)
        assert pool(PROMPT, samples("fine"))[0].score == 1
        assert pool.pids[1] != before


def segfault(text):
    ctypes.string_at(0)


def raise_exit(text):
    raise SystemExit(3)


CRASHES = {
    "exit": (lambda text: os._exit(7), "exited with code 7"),
    "exit well": (lambda text: os._exit(0), "exited with code 0"),
    "segfault": (segfault, "was killed by SIGSEGV"),
    "abort": (lambda text: os.abort(), "was killed by SIGABRT"),
    "kill": (lambda text: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "its group": (lambda text: os.killpg(0, signal.SIGKILL), "was killed by SIGKILL"),
    "SystemExit": (raise_exit, "raised SystemExit: 3"),
    "memory": (lambda text: len(bytearray(10**10)), "ran out of memory"),
    "memory, by and by": (lambda text: len([bytes(10**6) for _ in range(10**4)]), "ran out of memory"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_is_an_error_that_says_what(name):
    judge, detail = CRASHES[name]
    with VerifierPool(Plain(lambda text: judge(text) if text == "crash" else 1.0), settings(memory_mb=256)) as pool:
        for _ in range(2):
            (verdict,) = pool(PROMPT, samples("crash"))
            assert (verdict.status, verdict.correct, verdict.score) == ("error", False, -1)
            assert detail in verdict.detail
            assert pool(PROMPT, samples("fine"))[0].score == 1


def test_a_verifier_that_keeps_the_limit_itself_is_given_the_time_to_say_so(monkeypatch):
    monkeypatch.setattr("dapo_rl.workers.pool.GRACE_S", 10.0)
    with VerifierPool(Plain(lambda text: time.sleep(LIMIT_S + 0.2) or 1), settings(timeout_s=LIMIT_S)) as pool:
        assert pool(PROMPT, samples("x"))[0].score == 1


def test_the_memory_of_the_run_does_not_count():
    ballast = bytearray(b"x") * (300 << 20)
    with VerifierPool(
        Plain(lambda text: (len(ballast) + len(bytearray(50 << 20))) >> 20), settings(memory_mb=128)
    ) as pool:
        assert pool(PROMPT, samples("x"))[0].score == 350


def test_a_function_that_keeps_its_memory_gets_a_new_worker_when_it_has_run_out():
    kept = []

    def reward(completions):
        kept.append(np.zeros(1000 << 20, np.uint8))  # much more than a worker can free of this process and use as well
        return [1.0] * len(completions)

    reward_settings = settings(memory_mb=2500)
    with VerifierPool(CustomVerifier(reward, reward_settings), reward_settings) as pool:
        statuses = [pool(PROMPT, samples("x"))[0].status for _ in range(6)]
    assert statuses == ["correct", "correct", "error"] * 2


def test_what_a_killed_call_had_started_is_killed_too(tmp_path):
    def start(text):
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(child.pid), encoding="utf-8")
        child.wait()

    with VerifierPool(Plain(start), settings(timeout_s=LIMIT_S)) as pool:
        assert pool(PROMPT, samples("x"))[0].status == "timeout"
        pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
        wait_until(lambda: not is_alive(pid))


def misbehave(text):
    if text == "hang":
        time.sleep(1000)
    if text == "exit":
        os._exit(3)
    return float(text)


def test_one_sample_fails_alone_where_samples_are_judged_apart():
    def compute_score(solution_str):
        return misbehave(solution_str)

    with VerifierPool(CustomVerifier(compute_score, settings()), settings(timeout_s=LIMIT_S)) as pool:
        verdicts = pool(PROMPT, samples("1", "hang", "0", "exit", "2", "hang"))
    assert [v.status for v in verdicts] == ["correct", "timeout", "wrong", "error", "correct", "timeout"]
    assert [v.score for v in verdicts] == [1, -1, 0, -1, 2, -1]
    assert verdicts[3].detail == "the verifier's process exited with code 3"


def test_the_group_fails_together_where_it_is_judged_together():
    def reward(completions):
        return [misbehave(text) for text in completions]

    for function in (reward, [reward, "exact"]):
        ours = settings()
        verifier = CustomVerifier(reward, ours)
        if function is not reward:
            verifier = CombinedVerifier([verifier, ExactVerifier(ours)])
        with VerifierPool(verifier, ours) as pool:
            assert [v.status for v in pool(PROMPT, samples("1", "exit", "2"))] == ["error"] * 3
            assert [v.status for v in pool(PROMPT, samples("1", "0"))] == ["correct", "wrong"]


class Alone:
    """Ends its process if it gets more than one sample."""

    per_sample = True

    def __call__(self, prompt, samples):
        if len(samples) > 1:
            os._exit(3)
        return [Verdict(float(samples[0].text), True, "correct")]


@pytest.mark.parametrize("count", [2, 3])
def test_samples_that_fail_only_together_are_judged_one_by_one(count):
    with VerifierPool(Alone(), settings()) as pool:
        assert [v.score for v in pool(PROMPT, samples(*map(str, range(count))))] == list(range(count))


def test_samples_that_are_slow_only_in_sum_are_judged_one_by_one():
    calls = []

    def slow(text):
        calls.append(text)
        time.sleep(0.3)
        return len(calls)

    with VerifierPool(Plain(slow, per_sample=True), settings(timeout_s=LIMIT_S)) as pool:
        assert [v.score for v in pool(PROMPT, samples(*"abcd"))] == [1, 2, 3, 4]
        pid = pool.pids[1]
        # From here on without trying the group: the worker is not killed again.
        assert [v.score for v in pool(PROMPT, samples(*"abcd"))] == [5, 6, 7, 8]
        assert pool.pids[1] == pid


@pytest.mark.parametrize(
    ("verifier", "per_sample"),
    [
        (MathVerifier(settings()), True),
        (ExactVerifier(settings()), True),
        (GymVerifier(settings()), True),
        (CustomVerifier(lambda solution_str: 1.0, settings()), True),
        (CustomVerifier(lambda completions: [1.0], settings()), False),
        (CombinedVerifier([MathVerifier(settings()), ExactVerifier(settings())]), True),
        (CombinedVerifier([MathVerifier(settings()), CustomVerifier(lambda completions: [1.0], settings())]), False),
        (CombinedVerifier([MathVerifier(settings()), Plain(float)]), False),
    ],
)
def test_which_verifiers_judge_samples_apart(verifier, per_sample):
    assert verifier.per_sample is per_sample


def test_a_function_of_the_group_gets_tokens_and_columns():
    def reward(prompts, completions, completion_ids, level, answer):
        return [1.0 if (ids, a, b, p) == ([7, 8], 3, "5", "2+3=") else 0.0 for ids, a, b, p in
                zip(completion_ids, level, answer, prompts, strict=True)]  # fmt: skip

    with VerifierPool(CustomVerifier(reward, settings()), settings()) as pool:
        assert [v.score for v in pool(PROMPT, samples("a", "b"))] == [1, 1]


def test_state_that_cannot_be_pickled(tmp_path):
    path = tmp_path / "log"
    lock = threading.Lock()
    with path.open("a", encoding="utf-8") as log:

        def reward(completions, **columns):
            with lock:
                log.write("judged\n")
                log.flush()
            return [len(text) for text in completions]

        with VerifierPool(CustomVerifier(reward, settings()), settings()) as pool:
            assert [v.score for v in pool(PROMPT, samples("a", "bb"))] == [1, 2]
    assert path.read_text(encoding="utf-8") == "judged\n"


def test_async_functions():
    async def reward(completions):
        await asyncio.sleep(0.01)
        return [len(text) for text in completions]

    async def hang(solution_str):
        await asyncio.sleep(1000 if solution_str == "hang" else 0)
        return 1.0

    async def within_a_loop():
        with VerifierPool(CustomVerifier(reward, settings()), settings()) as pool:
            return pool(PROMPT, samples("a", "bb"))

    with VerifierPool(CustomVerifier(reward, settings()), settings()) as pool:
        assert [v.score for v in pool(PROMPT, samples("a", "bb"))] == [1, 2]
    assert [v.score for v in asyncio.run(within_a_loop())] == [1, 2]
    with VerifierPool(CustomVerifier(hang, settings()), settings(timeout_s=LIMIT_S)) as pool:
        assert [v.status for v in pool(PROMPT, samples("hang", "x"))] == ["timeout", "correct"]


@pytest.mark.parametrize("returned", ["no list", [1.0], [float("nan")] * 2, ["a", "b"], None, [None, None]])
def test_what_is_no_list_of_scores_is_an_error(returned):
    with VerifierPool(CustomVerifier(lambda completions: returned, settings()), settings()) as pool:
        assert [v.status for v in pool(PROMPT, samples("a", "b"))] == ["error"] * 2


def test_one_traceback_for_all_workers(tmp_path):
    def reward(completions):
        (tmp_path / completions[0]).touch()
        while len(list(tmp_path.iterdir())) < 3:  # until each worker has a group
            time.sleep(0.01)
        raise ZeroDivisionError("here")

    ours = settings(workers=3)
    with VerifierPool(CustomVerifier(reward, ours), ours) as pool:
        tickets = [pool.submit(PROMPT, samples(name, "x")) for name in "abcdefgh"]
        details = [v.detail for ticket in tickets for v in ticket.result()]
    assert len(details) == 16
    assert all("raised ZeroDivisionError: here" in detail for detail in details)
    (whole,) = [detail for detail in details if "Traceback" in detail]
    assert 'raise ZeroDivisionError("here")' in whole
    assert len({detail for detail in details if detail is not whole}) == 1


def test_the_users_mistake_comes_out_as_it_is():
    with VerifierPool(MathVerifier(settings()), settings()) as pool:
        with pytest.raises(UserError, match=r"prompt p9: .*data\.answer_key") as caught:
            pool(Prompt("p9", "?", (1,)), samples("Answer: 5"))
        assert (type(caught.value), "\n" in str(caught.value)) == (UserError, False)
        assert not getattr(caught.value, "__notes__", [])
        assert pool(PROMPT, samples("Answer: 5"))[0].correct


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_verifier_raises_comes_with_its_traceback(workers):
    def fail(text):
        raise KeyError(text)

    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def fail_oddly(text):
        raise OddError(1, 2)

    with VerifierPool(Plain(fail), settings(workers=workers)) as pool:
        (verdict,) = pool(PROMPT, samples("x"))
    assert (verdict.status, "raise KeyError(text)" in verdict.detail) == ("error", True)
    with VerifierPool(Plain(fail_oddly), settings(workers=workers)) as pool:
        assert "raised OddError: 1 and 2" in pool(PROMPT, samples("x"))[0].detail


def test_random_numbers_do_not_depend_on_the_worker():
    import random

    import numpy as np

    def draw(text):
        time.sleep(0.02)
        return random.random() + np.random.random()

    scores = []
    for workers in (1, 3):
        with VerifierPool(Plain(draw), settings(workers=workers)) as pool:
            tickets = [pool.submit(PROMPT, samples(str(n))) for n in range(9)]
            scores.append([ticket.result()[0].score for ticket in tickets])
    assert scores[0] == scores[1]
    assert len(set(scores[0])) == 9


def test_what_a_function_prints_is_shown_once():
    code = """
    from dapo_rl.config import RewardSettings
    from dapo_rl.rewards import CustomVerifier, VerifierPool
    from dapo_rl.types import Prompt, Trajectory
    print("start")
    settings = RewardSettings(workers=1)
    pool = VerifierPool(CustomVerifier(lambda completions: print("judged") or [1.0], settings), settings)
    pool(Prompt("p", "?", (1,)), [Trajectory((), (), "x", "stop")])
    print("end")
    """
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=buffered)
    assert sorted(out.stdout.split()) == ["end", "judged", "start"]
    assert out.stderr == ""


def test_how_many_workers(monkeypatch):
    for cores, count in ((1, 1), (2, 1), (4, 3), (9, 8), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert worker_count(RewardSettings()) == count
    assert worker_count(RewardSettings(workers=12)) == 12


def test_no_workers_is_this_process():
    seen = []
    pool = VerifierPool(Plain(lambda text: seen.append(os.getpid()) or 1), settings(workers=0))
    assert pool(PROMPT, samples("a"))[0].score == 1
    assert (seen, pool.pids, pool.note) == ([os.getpid()], [], "")
    with pytest.raises(UserError):
        VerifierPool(MathVerifier(settings()), settings(workers=0)).submit(Prompt("p", "?", (1,)), []).result()
    pool.close()


def test_a_platform_without_fork_says_so(monkeypatch):
    monkeypatch.delattr(pool_module.os, "fork")
    pool = VerifierPool(Plain(float), settings())
    assert pool(PROMPT, samples("3"))[0].score == 3
    assert pool.pids == []
    assert "cannot fork" in pool.note


@pytest.mark.parametrize("verifier", [MathVerifier(settings()), Plain(float)])
def test_it_needs_an_answer_where_its_verifier_does(verifier):
    combined = CombinedVerifier([Plain(float), verifier])
    for one in (verifier, combined):
        with VerifierPool(one, settings()) as pool:
            assert pool.needs_answer is isinstance(verifier, MathVerifier)


def test_what_takes_long_to_load_is_loaded_once_and_outside_of_the_limit(tmp_path):
    class Slow(Plain):
        loaded = False

        def warm_up(self):
            time.sleep(1.5)
            self.loaded = True
            (tmp_path / f"{os.getpid()}").touch()

    verifier = Slow(lambda text: misbehave(text) + verifier.loaded)
    with VerifierPool(verifier, settings(workers=2, timeout_s=LIMIT_S)) as pool:
        tickets = [pool.submit(PROMPT, samples(text)) for text in ("1", "exit", "2", "exit", "3")]
        scores = [ticket.result()[0].score for ticket in tickets]
        fork_server = pool.pids[0]
    assert scores == [2, -1, 3, -1, 4]
    assert [path.name for path in tmp_path.iterdir()] == [str(fork_server)]


def test_nothing_is_left_after_closing():
    pool = VerifierPool(Plain(misbehave), settings(workers=2, timeout_s=1000))
    pool(PROMPT, samples("1"))
    running = [pool.submit(PROMPT, samples("hang")) for _ in range(2)]
    wait_until(lambda: all(ticket.running() for ticket in running) and len(pool.pids) == 3)
    waiting = pool.submit(PROMPT, samples("2"))
    pids, threads = pool.pids, pool._workers.threads
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2
    assert not any(is_alive(pid) for pid in pids)
    assert not any(thread.is_alive() for thread in threads)
    for ticket in running:
        with pytest.raises(RuntimeError, match="closed"):
            ticket.result(timeout=5)
    with pytest.raises(CancelledError):
        waiting.result(timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(PROMPT, samples("1"))
    pool.close()


def test_nothing_is_left_when_nobody_has_the_pool_any_more():
    pool = VerifierPool(Plain(float), settings())
    pool(PROMPT, samples("1"))
    pids = pool.pids
    assert all(is_alive(pid) for pid in pids)
    del pool
    gc.collect()
    assert not any(is_alive(pid) for pid in pids)


def test_two_pools_are_closed_in_any_order():
    first = VerifierPool(Plain(float), settings())
    first(PROMPT, samples("1"))
    second = VerifierPool(Plain(float), settings())  # it has copies of the first one's sockets
    second(PROMPT, samples("1"))
    pids = first.pids
    start = time.monotonic()
    first.close()
    assert time.monotonic() - start < 1.5
    assert not any(is_alive(pid) for pid in pids)
    assert second(PROMPT, samples("2"))[0].score == 2
    second.close()


def test_a_pool_made_in_a_thread_outlives_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(VerifierPool(Plain(float), settings())))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as pool:
        assert pool(PROMPT, samples("1"))[0].score == 1


RUN = """
import ctypes, os, signal, sys, threading, time
from dapo_rl.config import RewardSettings
from dapo_rl.rewards import VerifierPool
from dapo_rl.types import Prompt, Trajectory, Verdict

def judge(prompt, samples):
    if samples[0].text == "hang":
        open(sys.argv[1], "w").close()
        ctypes.CDLL(None).pause() if sys.argv[2] == "pause" else sum(range(10**12))
    return [Verdict(1.0, True, "correct") for _ in samples]

def make():
    global pool
    pool = VerifierPool(judge, RewardSettings(workers=2, timeout_s=1000))

prompt, sample = Prompt("p", "?", (1,)), Trajectory((), (), "fine", "stop")
if sys.argv[3] == "thread":
    thread = threading.Thread(target=make); thread.start(); thread.join()
else:
    make()
pool(prompt, [sample])
ticket = pool.submit(prompt, [Trajectory((), (), "hang", "stop")])
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
while len(pool.pids) < 3:
    pool(prompt, [sample])
print(*pool.pids, flush=True)
"""


def start_run(tmp_path, code, hang="pause", where="main", popen=forked.Popen):
    arguments = [sys.executable, "-c", RUN + textwrap.dedent(code), str(tmp_path / "hangs"), hang, where]
    return popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(("hang", "where"), [("pause", "main"), ("loop", "thread")])
def test_workers_die_with_a_run_that_is_killed(tmp_path, hang, where):
    run = start_run(tmp_path, "time.sleep(1000)", hang, where)
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 3
    assert all(is_alive(pid) for pid in pids)
    run.kill()
    run.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError", "os.kill(os.getpid(), signal.SIGINT)"])
def test_workers_end_with_a_run_that_ends_without_closing(tmp_path, end):
    """A real process: a forked one does not end as Python does."""
    run = start_run(tmp_path, f"sys.stderr = open(os.devnull, 'w')\n{end}", popen=subprocess.Popen)
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 3
    run.wait(timeout=PATIENCE_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_to_every_process_are_for_the_run_to_decide(tmp_path, number):
    code = f"""
    heard = []
    signal.signal(signal.{number}, lambda *_: heard.append(1))
    print("ready", flush=True)
    while not heard:
        time.sleep(0.01)
    time.sleep(0.2)
    print(*(v.score for _ in range(4) for v in pool(prompt, [sample])), not ticket.done(), *pool.pids, flush=True)
    pool.close()
    """
    run = start_run(tmp_path, code, hang="loop")
    pids = run.stdout.readline().split()
    assert run.stdout.readline() == "ready\n"
    os.killpg(run.pid, getattr(signal, number))
    for pid in pids:  # the workers are in groups of their own
        os.kill(int(pid), getattr(signal, number))
    assert run.stdout.readline().split() == ["1.0"] * 4 + ["True", *pids]
    assert run.wait(timeout=PATIENCE_S) == 0


def test_signals_of_a_worker_do_not_wake_the_run():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(0.3)
    before = signal.set_wakeup_fd(theirs.fileno())  # as a running event loop does
    try:
        with ours, theirs, VerifierPool(Plain(float), settings()) as pool:
            pool(PROMPT, samples("1"))
            os.kill(pool.pids[1], signal.SIGINT)
            assert pool(PROMPT, samples("2"))[0].score == 2
            with pytest.raises(TimeoutError):
                ours.recv(1)
    finally:
        signal.set_wakeup_fd(before)


def test_a_forked_copy_of_the_run_leaves_the_pool_alone():
    with VerifierPool(Plain(float), settings()) as pool:
        pid = os.fork()
        if pid == 0:
            try:
                pool.close()
                pool(PROMPT, samples("1"))
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert pool(PROMPT, samples("1"))[0].score == 1


def test_a_pool_that_cannot_start_its_threads_leaves_no_process(monkeypatch):
    started, forked = [], []
    start, fork = threading.Thread.start, os.fork

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def record():
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    monkeypatch.setattr(threading.Thread, "start", start_one)
    monkeypatch.setattr(os, "fork", record)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        VerifierPool(lambda prompt, samples: [], RewardSettings(workers=2))
    started[0].join(timeout=5)
    assert not started[0].is_alive()
    (supervisor,) = forked
    assert not os.path.exists(f"/proc/{supervisor}")


class ByEnd:
    """Judges a text by how it ended; a group at once takes too long."""

    per_sample = text_only = True

    def __call__(self, prompt, samples):
        if len(samples) > 1:
            time.sleep(PATIENCE_S)
        ended = [sample.finish_reason == "stop" for sample in samples]
        return [Verdict(float(is_whole), is_whole, "correct" if is_whole else "wrong") for is_whole in ended]


def test_equal_texts_share_a_verdict_only_if_they_ended_alike():
    group = [Trajectory((7,), (-0.1,), "same", reason) for reason in ("stop", "length", "stop", "length")]
    with VerifierPool(ByEnd(), settings(timeout_s=LIMIT_S)) as pool:
        assert [verdict.score for verdict in pool(PROMPT, group)] == [1.0, 0.0, 1.0, 0.0]
