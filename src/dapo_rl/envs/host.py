"""The episodes of a worker process."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

from dapo_rl.envs.protocol import Observation
from dapo_rl.envs.replies import GoneError, Operation, Result, encode_result, failure_of, observation_of, opening_of
from dapo_rl.types import Prompt


class Host:
    """The episodes in a worker. Its methods may be called for several episodes at a time."""

    def __init__(self, factory: Callable[[], Any], name: str, stateless: bool) -> None:
        self._factory, self._name, self._stateless = factory, name, stateless
        self._environments: dict[str, Any] = {}
        self._prompts: dict[str, Prompt] = {}

    def _environment(self, key: str) -> Any:
        key = "" if self._stateless else key
        if self._stateless and key not in self._environments:
            self._environments[key] = self._factory()
        if key not in self._environments:
            raise GoneError("the process of the episode has ended")
        return self._environments[key]

    def begin(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Any:
        """Calls the user's method; the value may be awaitable."""
        if operation == "open":
            prompt, seed, *context = arguments
            _seed(seed)
            environment = self._environment(key) if self._stateless else self._factory()
            self._environments["" if self._stateless else key] = environment
            self._prompts[key] = prompt
            return _optional(environment, "open", prompt, seed, *context)
        environment = self._environment(key)
        if operation == "step":
            return environment.step(*arguments)
        if operation == "result":
            return _optional(environment, "result")
        self._prompts.pop(key, None)
        if self._stateless:
            return None
        del self._environments[key]
        return _optional(environment, "close")

    def end(self, operation: Operation, key: str, value: Any) -> Result:
        """The result of a call from what the method returned."""
        if operation == "open":
            return opening_of(self._prompts.pop(key), value)  # of stateless episodes, no process is told of the end
        if operation == "close" or (operation == "result" and value is None):
            return Observation()
        return observation_of(value)

    def call(self, body: bytearray, runner: asyncio.Runner) -> dict[str, Any]:
        """A whole call, as a row. One runner for all: connections of an environment stay open."""
        try:
            operation, key, arguments = pickle.loads(body)
            value = self.begin(operation, key, arguments)
            if inspect.isawaitable(value):
                value = runner.run(awaited(value))
            return encode_result(self.end(operation, key, value))
        except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
            return encode_result(self.failed(error))

    def failed(self, error: BaseException) -> Result:
        return failure_of(self._name, error)


def _optional(environment: Any, name: str, *arguments: Any) -> Any:
    """Calls a method, if there is one: an attribute of that name may also be a value of the environment's own."""
    method = getattr(environment, name, None)
    return method(*arguments) if callable(method) else None


def _seed(seed: int) -> None:
    """Seeds random numbers, so that the episodes of a group begin alike in any worker."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


async def awaited(value: Any) -> Any:
    return await value
