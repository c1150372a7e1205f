"""Environments as the service of worker processes: how a worker answers a call."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.event_loop import AtWork, EventLoop
from dapo_rl.envs.host import Host, awaited
from dapo_rl.envs.replies import encode_bounded, encode_result
from dapo_rl.workers import Service


def environment_service(
    factory: Callable[[], Any], name: str, settings: EnvSettings, stateless: bool, at_work: AtWork | None
) -> Service:
    """The service of the workers of an environment. `factory` makes one for each episode. `at_work`: of asynchronous
    environments."""
    host, runner = Host(factory, name, stateless), asyncio.Runner()
    loop = None if at_work is None else EventLoop(host, settings.timeout_s, at_work)

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        if loop is not None:
            return loop.exchange(is_short, *pickle.loads(body))
        row = _call(host, runner, body)
        row["exhausted"] = row["kind"] == "failure" and is_short()
        return encode_bounded(row, name)

    return Service(answer, settings.memory_mb, name="environment", section="env")


def _call(host: Host, runner: asyncio.Runner, body: bytearray) -> dict[str, Any]:
    try:
        operation, key, arguments = pickle.loads(body)
        value = host.begin(operation, key, arguments)
        if inspect.isawaitable(value):
            value = runner.run(awaited(value))  # one loop for all calls: connections of an environment stay open
        return encode_result(host.end(operation, key, value))
    except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
        return encode_result(host.failed(error))
