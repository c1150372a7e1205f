"""What episodes that share a process do to each other: nothing."""

import asyncio
import os
import signal
import time

import pytest
from support import make_prompt

from dapo_rl.config import EnvSettings
from dapo_rl.envs import AssistantTurn, ToolCall
from dapo_rl.envs.build import _of_tools
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.textarena_env import TextArena
from dapo_rl.envs.trl_environment import TRLEnvironments

pytestmark = pytest.mark.slow


def work(hang: bool) -> str:
    """Works, with an alarm as TRL's examples set one.

    Args:
        hang: Whether it never ends.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if hang:
        time.sleep(1000)
    return "worked"


async def nap(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


class WithoutOpening:
    async def step(self, turn):
        return str(os.getpid())


def opened(pool, seed=0):
    key = pool.new_key()
    opening = pool.open(key, make_prompt("p"), seed).result(60)
    assert opening.messages
    return key, opening


def calls(*named):
    return AssistantTurn("", tuple(ToolCall(name, given, f"c{i}") for i, (name, given) in enumerate(named)))


def said(answer):
    return [message["content"] for message in answer.messages]


def test_hanging_tools_leave_those_of_other_episodes_alone_among_asynchronous_ones():
    settings = EnvSettings(tools=("x",), timeout_s=3, workers=4)
    with EnvironmentPool(_of_tools(settings.model_copy(update={"tools": ()}), [work, nap]), settings) as pool:
        hanging = [pool.step(opened(pool)[0], calls(("work", {"hang": True}))) for _ in range(12)]
        assert {each.result(60).reason for each in hanging} == {"timeout"}
        answer = pool.step(opened(pool)[0], calls(("work", {"hang": False}), ("nap", {"seconds": 0}))).result(60)
    assert said(answer) == ["worked", "waited"]


def test_asynchronous_calls_of_a_turn_run_at_the_same_time_also_beside_others():
    settings = EnvSettings(timeout_s=30, workers=1)
    with EnvironmentPool(_of_tools(settings, [work, nap]), settings) as pool:
        key, _ = opened(pool)
        pool.step(key, calls(("work", {"hang": False}))).result(60)  # the process has started
        began = time.monotonic()
        answer = pool.step(key, calls(*[("nap", {"seconds": 1.0})] * 8)).result(60)
        assert time.monotonic() - began < 6
    assert said(answer) == ["waited"] * 8


class Connected:
    """An asynchronous environment of TRL, with a connection that belongs to an event loop."""

    async def reset(self, **row):
        self.loop = asyncio.get_running_loop()
        return "begin"

    async def ask(self, text: str) -> str:
        """Asks.

        Args:
            text: What.
        """
        return text.upper() if asyncio.get_running_loop() is self.loop else "another loop"


def test_an_asynchronous_environment_of_trl_beside_functions_that_are_not():
    with EnvironmentPool(TRLEnvironments(Connected, [work]), EnvSettings(timeout_s=3, workers=2)) as pool:
        assert not pool.is_async
        first, other = opened(pool)[0], opened(pool)[0]
        answer = pool.step(first, calls(("ask", {"text": "a"}), ("work", {"hang": False}))).result(60)
        assert said(answer) == ["A", "worked"]
        assert pool.step(first, calls(("work", {"hang": True}))).result(60).reason == "timeout"
        assert said(pool.step(other, calls(("ask", {"text": "b"}))).result(60)) == ["B"]


class Countless:
    """Cannot be replayed."""

    def open(self, prompt, seed):
        return "begin"

    def step(self, turn):
        if turn.text == "hang":
            time.sleep(1000)
        return "more"


def test_an_episode_that_loses_its_process_to_another_is_not_to_blame():
    with EnvironmentPool(Countless, EnvSettings(timeout_s=2, workers=1)) as pool:
        guilty, other = opened(pool)[0], opened(pool)[0]
        assert pool.step(guilty, AssistantTurn("hang")).result(60).reason == "timeout"
        failure = pool.step(other, AssistantTurn("go")).result(60)
    assert failure.reason == "lost"
    assert failure.detail.endswith("raise env.workers")


def test_games_that_share_a_process_draw_their_own_numbers():
    pytest.importorskip("textarena")

    def play(pool, beside):
        key, opening = opened(pool, seed=7)
        boards = [opening.messages[-1]["content"]]
        for n in range(4):
            if beside:
                pool.step(opened(pool, seed=100 + n)[0], AssistantTurn("[up]")).result(60)
            boards.append(pool.step(key, AssistantTurn("[up]" if n % 2 else "[left]")).result(60).text)
        return boards

    def game():
        return TextArena("2048-v0")

    with EnvironmentPool(game, EnvSettings(workers=1)) as pool:
        alone, again, beside = play(pool, False), play(pool, False), play(pool, True)
    assert len({*alone}) > 1
    assert alone == again == beside


def test_asynchronous_episodes_without_an_opening_use_all_processes():
    with EnvironmentPool(WithoutOpening, EnvSettings(workers=2)) as pool:
        processes = {pool.step(opened(pool)[0], AssistantTurn("?")).result(60).text for _ in range(4)}
    assert len(processes) == 2
