"""TRL's protocol for reward functions: what they log, the state of the run, and limits of their own."""

import asyncio
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import CustomVerifier, VerifierPool, as_verifier
from dapo_rl.rewards.service import Reply, decode_reply, encode_reply
from dapo_rl.rewards.trainer_state import RewardState
from dapo_rl.rewards.validation import fault_of
from dapo_rl.types import Prompt, RewardPart, Trajectory, Verdict

WORKERS = [0, pytest.param(1, marks=pytest.mark.slow)]
PROMPT = Prompt("p1", "2+3=", (1, 2), "5")
SAMPLES = [Trajectory((7, 8), (-0.1, -0.2), "5", "stop"), Trajectory((9,), (-0.3,), "six", "length")]
GOOD = Verdict(0.5, False, "wrong", parts=(RewardPart("a", 1.0, 0.5),), extra={"x": 1}, metrics={"m": (3.0, 2)})


def settings(**changes):
    return RewardSettings(**{"workers": 1, "timeout_s": 20.0, **changes})


def verdicts_of(functions, weights=None, state=None, **changes):
    ours = settings(**changes)
    with VerifierPool(as_verifier(functions, ours, weights), ours) as pool:
        pool.state = state or pool.state
        return pool(PROMPT, SAMPLES)


def logs(completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_extra("characters", [len(completion) for completion in completions])
    log_extra("share", np.array([0.5, math.nan]))
    log_extra("ids", completion_ids)
    log_metric("longest", max(map(len, completions)))
    for value in (np.float32(1.0), True, 4):
        log_metric("several", value)
    return [1.0, trainer_state.global_step / trainer_state.max_steps]


@pytest.mark.parametrize("workers", WORKERS)
def test_what_a_function_logs_comes_back_with_the_verdicts(workers):
    first, second = verdicts_of(logs, state=RewardState(3, 12, 0.5), workers=workers)
    assert (first.score, second.score) == (1.0, 0.25)
    assert first.parts == (RewardPart("logs", 1.0, 1.0),)
    assert dict(first.extra) == {"characters": 1, "share": 0.5, "ids": "[7, 8]"}
    assert dict(second.extra) == {"characters": 3, "share": None, "ids": "[9]"}
    assert dict(first.metrics) == {"longest": (3.0, 1), "several": (6.0, 3)}
    assert second.metrics == {}


def brevity(completions, log_extra, log_metric, **columns):
    log_extra("characters", ["same name" for _ in completions])
    log_metric("several", 9.0)
    return [0.5, None]


@pytest.mark.parametrize("workers", WORKERS)
def test_functions_of_a_list_log_together(workers):
    first, second = verdicts_of([logs, brevity, "exact"], [1.0, 0.5, 2.0], RewardState(1, 1), workers=workers)
    assert first.score == 1.0 + 0.25 + 2.0
    assert first.parts == (RewardPart("logs", 1.0), RewardPart("brevity", 0.5, 0.5), RewardPart("exact", 1.0, 2.0))
    assert second.parts == (RewardPart("logs", 1.0), RewardPart("exact", -1.0, 2.0))
    assert dict(first.metrics) == {"longest": (3.0, 1), "several": (15.0, 4)}
    assert first.extra["characters"] == second.extra["characters"] == "same name"


def test_a_function_that_does_not_apply_may_log():
    def silent(completions, log_extra):
        log_extra("seen", [True, False])
        return [None, None]

    first, second = verdicts_of([silent, "exact"], workers=0)
    assert [v.extra for v in (first, second)] == [{"seen": True}, {"seen": False}]
    assert [part.name for part in first.parts] == ["exact"]


def test_verdicts_of_their_own_may_log_too():
    def own(prompt, samples):
        return [GOOD, replace(GOOD, metrics={})]

    first, second = verdicts_of([own, logs], [1.0, 1.0], RewardState(1, 1), workers=0)
    assert first.parts == (RewardPart("own", 0.5), RewardPart("logs", 1.0))
    assert (first.extra["x"], first.extra["characters"], second.extra["x"]) == (1, 1, 1)
    assert dict(first.metrics) == {"longest": (3.0, 1), "several": (6.0, 3), "m": (3.0, 2)}

    def many(completions, log_extra):
        for n in range(64):
            log_extra(f"x{n}", [n, n])
        return [1.0, 1.0]

    first, _ = verdicts_of([many, own], workers=0)
    assert (first.status, len(first.extra)) == ("correct", 64)


@pytest.mark.slow
def test_a_built_in_verifier_alone_has_no_parts():
    assert [(v.parts, v.extra, v.metrics) for v in verdicts_of("exact")] == [((), {}, {})] * 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda extra, metric: extra("x", [1]), "log_extra('x'): 1 value for 2 completions"),
        (lambda extra, metric: extra("x", "ab"), "log_extra('x'): expected a list of values, got 'ab'"),
        (lambda extra, metric: extra(3, [1, 2]), "log_extra: a name is a string, not 3"),
        (lambda extra, metric: metric("", 1), "log_metric: '' is not a name of 1 to 64 printable characters"),
        (lambda extra, metric: metric("a\nb", 1), "is not a name of 1 to 64 printable characters"),
        (lambda extra, metric: metric("x" * 65, 1), "is not a name of 1 to 64 printable characters"),
        (lambda extra, metric: metric("m", math.nan), "log_metric('m'): nan is not finite"),
        (lambda extra, metric: metric("m", 10**400), "log_metric('m'): "),
        (lambda extra, metric: metric("m", "3"), "log_metric('m'): expected a number, got '3'"),
        (lambda extra, metric: [metric(f"m{n}", 1) for n in range(65)], "there are 64 names already, which is the"),
    ],
)
def test_a_value_that_cannot_be_logged_fails_the_call_in_one_line(call, told):
    def function(completions, log_extra, log_metric):
        call(log_extra, log_metric)
        return [1.0, 1.0]

    for verdict in verdicts_of(function, workers=0):
        assert verdict.status == "error"
        assert told in verdict.detail.partition("\n")[0]
        assert len(verdict.detail.partition("\n")[0]) < 300


@pytest.mark.slow
def test_a_long_value_is_shortened():
    def function(completions, log_extra):
        log_extra("text", ["x" * 10**6, 10**400])
        return [1.0, 1.0]

    first, second = verdicts_of(function)
    assert 1000 < len(first.extra["text"]) < 1100
    assert second.extra["text"].startswith("1000")


@pytest.mark.slow
def test_asynchronous_functions_run_at_the_same_time():
    running = []

    def function(name):
        async def score(completions, **columns):
            running.append(name)
            while len(running) < 2:  # each waits for the other to start
                await asyncio.sleep(0.001)
            return [1.0, 0.0]

        return score

    assert [v.score for v in verdicts_of([function("a"), function("b")], timeout_s=5)] == [2.0, 0.0]


@pytest.mark.slow
def test_a_function_has_a_limit_of_its_own():
    async def slow(completions, **columns):
        await asyncio.sleep(60)
        return [1.0, 1.0]

    slow.timeout_s = 0.2
    for functions in (slow, ["exact", slow]):
        for workers in (0, 1):
            began = time.monotonic()
            verdicts = verdicts_of(functions, workers=workers)
            assert time.monotonic() - began < 15
            assert [v.status for v in verdicts] == ["timeout", "timeout"]
            assert verdicts[0].detail.endswith("slow: not decided within 0.2 s")


@pytest.mark.slow
def test_a_limit_of_its_own_may_be_longer_than_the_common_one():
    async def patient(completions, **columns):
        await asyncio.sleep(0.6)
        return [1.0, 0.0]

    assert [v.status for v in verdicts_of(patient, timeout_s=0.1)] == ["timeout", "timeout"]
    patient.timeout_s = 20
    assert [v.status for v in verdicts_of(patient, timeout_s=0.1)] == ["correct", "wrong"]
    assert [v.score for v in verdicts_of(["exact", patient], timeout_s=0.1)] == [2.0, -1.0]


def test_the_limits_of_a_call():
    async def waiting(completions): ...
    def working(completions): ...
    def other(completions): ...

    waiting.timeout_s, working.timeout_s = 7, 4
    twice = CustomVerifier(waiting, settings(), timeout_s=9)
    ours = settings(timeout_s=2)
    assert as_verifier([other, "exact"], ours).timeout_s is None
    assert as_verifier([waiting, twice, working], ours).timeout_s == 9 + 4
    assert as_verifier([waiting, working, other], ours).timeout_s == 7 + 4 + 2
    working.timeout_s = 20
    assert as_verifier([waiting, working], ours).timeout_s == 7 + 20
    working.timeout_s = "soon"
    with pytest.raises(UserError, match=r"working\.timeout_s: 'soon' is not a number of seconds above 0"):
        as_verifier(working, ours)


@pytest.mark.slow
def test_an_asynchronous_function_may_raise_anything():
    async def leaves(completions):
        raise SystemExit(3)

    async def stops(completions):
        raise UserError("no judge is running")

    async def late(completions):
        raise TimeoutError("the server is busy")

    assert "raised SystemExit: 3" in verdicts_of(leaves)[0].detail
    assert [v.status for v in verdicts_of(late)] == ["error", "error"]
    with pytest.raises(UserError, match="no judge is running"):
        verdicts_of(["exact", stops])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"correct": True}, "correct is True, but whose status is wrong"),
        ({"status": "correct"}, "correct is False, but whose status is correct"),
        ({"parts": [("a", 1.0, 1.0)]}, "parts are not a tuple of at most 64 RewardPart"),
        ({"parts": None}, "parts are not a tuple"),
        ({"parts": (RewardPart("a", math.inf),)}, "have a score or a weight for 'a' that is not a finite float"),
        ({"parts": (RewardPart("a", 1.0), RewardPart("a", 2.0))}, "parts have a name twice"),
        ({"parts": (RewardPart("\n", 1.0),)}, "parts have a wrong name"),
        ({"extra": {"x": [1]}}, "extra has a value that cannot be logged for 'x'"),
        ({"extra": {"x": math.nan}}, "extra has a value that cannot be logged for 'x'"),
        ({"extra": {f"x{n}": 1 for n in range(65)}}, "extra is not a dict with at most 64 names"),
        ({"metrics": {"x": 1.0}}, "metrics has something other than a sum and a count for 'x'"),
        ({"metrics": {"x": (math.nan, 1)}}, "metrics has a sum or a count that is out of range for 'x'"),
    ],
)
def test_an_unsound_verdict(change, told):
    assert fault_of(GOOD) == ""
    assert told in fault_of(replace(GOOD, **change))


def test_replies_with_everything_come_back_as_they_were():
    reply = Reply("verdicts", [GOOD, Verdict(-1.0, False, "wrong"), replace(GOOD, extra={"½": None, "y": "\ud800"})])
    assert decode_reply(bytearray(encode_reply(reply)), 3) == reply
