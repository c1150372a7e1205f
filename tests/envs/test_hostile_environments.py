"""Whatever an environment does ends its own episode, with a reason, and never the run."""

import contextlib
import os
import time
from pathlib import Path

import pytest
from hostile import ASYNC_CALLS, CALLS, SPARED, Asynchronous, Stateful, Stateless
from support import make_prompt

from dapo_rl.config import EnvSettings
from dapo_rl.envs import AssistantTurn, Observation, Opening
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.protocol import EpisodeFailure

pytestmark = pytest.mark.slow

SECONDS = 4.0
PLACES = ("open", "result", "close")
ELSEWHERE = ("hang", "sleep", "exit", "kill", "fork", "close files", "garbage", "take memory", "bytes", "dict", "nan",
             "exit exception", "unspeakable", "long exception", "forged failure")  # fmt: skip


@contextlib.contextmanager
def pool_of(kind, **settings):
    """Its processes write their output nowhere."""
    settings = {"name": "x:y", "timeout_s": SECONDS, "memory_mb": 512} | settings
    output, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            SPARED.add(os.fstat(int(number)).st_ino)
    mark = os.environ["HOSTILE_MARK"] = f"hostile-{os.getpid()}-{time.monotonic_ns()}"
    try:
        pool = EnvironmentPool(kind, EnvSettings(**settings))
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)
    with pool:
        yield pool
        supervisor = pool._supervisor.pid
    assert not Path(f"/proc/{supervisor}").exists()
    assert not any(mark.encode() in command for command in commands()), "a daemon is left"


def commands():
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield process.read_bytes()


def turn(text="hello"):
    return AssistantTurn(text)


def reason(result):
    if isinstance(result, EpisodeFailure):
        assert result.detail
        assert len(result.detail) < 20_000
        return result.reason
    assert isinstance(result, Observation | Opening)
    return None


def wait(future, seconds=60):
    return future.result(timeout=seconds)


def opened(pool, what):
    key = pool.new_key()
    return key, wait(pool.open(key, make_prompt("p", answer=what), seed=1))


def clean(result):
    """Whether all that it says can be written."""
    if isinstance(result, Observation):
        result.text.encode()


@pytest.fixture(scope="module")
def stateful():
    with pool_of(Stateful, workers=12) as pool:
        yield pool


@pytest.fixture(scope="module")
def stateless():
    with pool_of(Stateless, workers=12) as pool:
        yield pool


@pytest.fixture(scope="module")
def asynchronous():
    with pool_of(Asynchronous) as pool:
        yield pool


def in_parallel(pool, calls):
    """Hostile calls, a few at a time, and between them those of an episode that does nothing wrong."""
    found, names = {}, list(calls)
    for first in range(0, len(names), 6):
        some = names[first : first + 6]
        futures = {name: calls[name]() for name in some}
        good, opening = opened(pool, "nothing")
        assert reason(opening) is None
        for name in some:
            result = wait(futures[name])
            clean(result)
            found[name] = reason(result)
        assert wait(pool.step(good, turn("nothing"))).text == "go on"
        assert wait(pool.step(good, turn("end"))).reward == 1.0
        pool.close_episodes([good])
    return found


def test_a_step_of_an_environment_with_a_state(stateful):
    keys = {}

    def call(name):
        keys[name], opening = opened(stateful, name)
        assert reason(opening) is None
        return stateful.step(keys[name], turn())

    found = in_parallel(stateful, {name: lambda name=name: call(name) for name in CALLS})
    assert found == {name: why for name, (_, why) in CALLS.items()}
    stateful.close_episodes(keys.values())
    assert stateful.open_episodes == 0


def test_a_step_of_tools(stateless):
    keys = []

    def call(name):
        keys.append(opened(stateless, name)[0])
        return stateless.step(keys[-1], turn(name))

    found = in_parallel(stateless, {name: lambda name=name: call(name) for name in CALLS})
    assert found == {name: why for name, (_, why) in CALLS.items()}
    stateless.close_episodes(keys)
    assert stateless.open_episodes == 0


@pytest.mark.parametrize("name", [*CALLS, *ASYNC_CALLS])
def test_a_step_of_an_asynchronous_environment(asynchronous, name):
    """Others on the event loop go on, unless it is ended."""
    why = (CALLS | ASYNC_CALLS)[name][1]
    before, _ = opened(asynchronous, "nothing")
    napping, _ = opened(asynchronous, "nap")
    key, opening = opened(asynchronous, name)
    assert reason(opening) is None
    nap = asynchronous.step(napping, turn())
    result = wait(asynchronous.step(key, turn()))
    clean(result)
    # Forged replies to earlier calls are ignored, and what forges them then takes too long.
    assert reason(result) in ((why, "timeout") if name.startswith("forged") else (why,))
    ended = name != "await" and why in ("timeout", "crashed")
    others = {reason(wait(asynchronous.step(before, turn()))), reason(wait(nap))}
    if name == "cancel all":
        assert others <= {None, "error"}
    elif name not in ("long exception", "long text", "long message"):  # which take the loop's time
        assert others <= ({None, "lost", "timeout", "crashed"} if ended else {None})
    after, opening = opened(asynchronous, "nothing")
    assert reason(opening) is None
    assert wait(asynchronous.step(after, turn("end"))).reward == 1.0
    asynchronous.close_episodes([before, napping, key, after])
    assert not {before, napping, key, after} & asynchronous._calls._episodes.keys()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["stateful", "asynchronous"])
def test_other_calls(request, kind, place):
    pool = request.getfixturevalue(kind)
    for name in ELSEWHERE:
        key, opening = opened(pool, f"{place}:{name}")
        # The run ignores a forged reply, or takes it for corrupt.
        why = {"crashed", "timeout"} if name.startswith("forged") else {CALLS[name][1]}
        if place == "open":
            assert reason(opening) in ({"error"} if name == "fork" else why), name
        elif place == "result":
            assert reason(wait(pool.result(key))) in why, name
        pool.close_episodes([key])
    assert pool.open_episodes == 0
    reward, end = 0.0, time.monotonic() + 60
    while not reward and time.monotonic() < end:  # it may share a process with one that closes
        good, _ = opened(pool, "nothing")
        reward = getattr(wait(pool.step(good, turn("end"))), "reward", 0.0)
        pool.close_episodes([good])
    assert reward == 1.0


@pytest.mark.parametrize("kind", [Stateful, Stateless, Asynchronous])
@pytest.mark.parametrize("what", ["sleep", "hang", "stop itself"])
def test_a_pool_closes_while_calls_hang(kind, what):
    with pool_of(kind, timeout_s=60) as pool:
        keys = [opened(pool, what)[0] for _ in range(4)]
        calls = [pool.step(key, turn(what)) for key in keys]
        time.sleep(0.5)
        started = time.monotonic()
        pool.close()
        assert time.monotonic() - started < 4
        for call in calls:
            with contextlib.suppress(Exception):
                wait(call, 5)
            assert call.done()
