"""The episodes of a worker, without the worker."""

import gc
import json
import time
import weakref
from dataclasses import replace

from patience import wait_until
from support import make_prompt

from dapo_rl.envs import AssistantTurn, event_loop
from dapo_rl.envs.event_loop import EventLoop, calls_at_work
from dapo_rl.envs.host import Host


class Talker:
    async def step(self, turn):
        return "x" * 40_000


class Mark:
    """Of a prompt."""


class Stateless:
    def open(self, prompt, seed):
        return " Go on."

    def step(self, turn):
        return 1.0


def test_prompts_are_not_kept_once_their_episodes_have_begun():
    """No process is told of the end of a stateless episode."""
    host = Host(Stateless, "stateless", True)
    kept = []
    for number in range(3):
        mark = Mark()
        prompt = replace(make_prompt("p"), columns={"mark": mark})
        opening = host.end("open", str(number), host.begin("open", str(number), (prompt, 0)))
        assert opening.messages[-1]["content"].endswith(" Go on.")
        kept.append(weakref.ref(mark))
        del prompt, mark
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_results_that_are_too_long_for_one_reply_come_in_several(monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_REPLY", 100_000)
    loop = EventLoop(Host(Talker, "talker", False), 60.0, calls_at_work(1))
    opens = [(number, "open", str(number), (make_prompt("p"), 0)) for number in range(1, 6)]
    steps = [(number + 5, "step", str(number), (AssistantTurn("?"),)) for number in range(1, 6)]
    loop.exchange(lambda: False, 0, [*opens, *steps], 0.0)
    time.sleep(0.2)  # all have answered, if the machine has no other work
    results = {}

    def are_there():
        reply = loop.exchange(lambda: False, 0, [], 0.0)
        assert len(reply) <= 100_000
        results.update(json.loads(reply)["results"])
        return {str(number) for number in range(6, 11)} <= results.keys()

    wait_until(are_there)
    assert [len(results[str(number)]["text"]) for number in range(6, 11)] == [40_000] * 5
