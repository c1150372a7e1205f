"""The episodes of a worker, without the worker."""

import json
import time

from support import make_prompt

from dapo_rl.envs import AssistantTurn, event_loop
from dapo_rl.envs.event_loop import AtWork, EventLoop
from dapo_rl.envs.host import Host


class Talker:
    async def step(self, turn):
        return "x" * 40_000


def test_results_that_are_too_long_for_one_reply_come_in_several(monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_REPLY", 100_000)
    loop = EventLoop(Host(Talker, "talker", False), 60.0, AtWork(1))
    opens = [(number, "open", str(number), (make_prompt("p"), 0)) for number in range(1, 6)]
    steps = [(number + 5, "step", str(number), (AssistantTurn("?"),)) for number in range(1, 6)]
    loop.exchange(lambda: False, 0, [*opens, *steps], 0.0)
    time.sleep(0.2)  # all have answered
    results = {}
    for _ in range(5):
        reply = loop.exchange(lambda: False, 0, [], 0.0)
        assert len(reply) <= 100_000
        results |= json.loads(reply)["results"]
    assert [len(results[str(number)]["text"]) for number in range(6, 11)] == [40_000] * 5
