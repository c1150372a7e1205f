"""Environments as the service of worker processes: calls and replies as bytes, and how a worker answers.

A call is pickled, since it comes from the run. A reply is JSON and is validated, since user code has access to the
worker's end of the socket.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, describe_traceback, shorten
from dapo_rl.config import EnvSettings
from dapo_rl.data.tasks import is_task
from dapo_rl.envs.protocol import (
    AgentError,
    AssistantTurn,
    EpisodeFailure,
    InvalidAnswerError,
    Observation,
    ObservationTooLongError,
    Opening,
)
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Verdict
from dapo_rl.workers import Service
from dapo_rl.workers.limits import MAX_REPLY
from dapo_rl.workers.worker import CorruptReplyError

MAX_TEXT = 8 << 20
"""Characters of an observation. A longer one ends the episode; what does not fit the context does so, too."""
MAX_REWARD = 1e6

Operation = Literal["open", "step", "result", "close"]
Result = Opening | Observation | EpisodeFailure | UserError
KINDS = {Opening: "opening", Observation: "observation", EpisodeFailure: "failure"}


class GoneError(Exception):
    """The process that had the episode has ended."""


# Calls.


def encode_step(operation: Operation, key: str, *arguments: Any) -> bytes:
    return pickle.dumps((operation, key, arguments), pickle.HIGHEST_PROTOCOL)


# Replies.


def encode_result(result: Result, exhausted: bool = False) -> dict[str, Any]:
    if isinstance(result, UserError):
        line, more = shorten(str(result), TRACEBACK_LIMIT), shorten(str(result.more), TRACEBACK_LIMIT)
        return {"kind": "fatal", "line": line, "more": more}
    kind = KINDS[type(result)]
    return {"kind": kind, "exhausted": exhausted, **asdict(result)}


def decode_result(row: Any) -> Result:
    """The validated result, or CorruptReplyError."""
    try:
        values = {str(name): value for name, value in row.items() if name != "exhausted"}
        kind = values.pop("kind")
        if kind == "fatal":
            return UserError(str(values["line"]), str(values["more"]))
        if kind == "failure":
            return EpisodeFailure(**values)
        if kind == "opening":
            return _opening(values)
        if kind != "observation":
            raise CorruptReplyError
        if values.get("conversation") is not None:
            values["conversation"] = _opening(values["conversation"])
        values["messages"] = _mappings(values.get("messages", ()))
        values["prompt_ids"] = tuple(map(int, values.get("prompt_ids", ())))
        observation = Observation(**values)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError):
        raise CorruptReplyError from None
    if _fault_of(observation):
        raise CorruptReplyError
    return observation


def _opening(values: Mapping[str, Any]) -> Opening:
    values = dict(values)
    messages, tools = (_mappings(values.pop(name, ())) for name in ("messages", "tools"))
    return Opening(messages, tools, tuple(map(int, values.pop("prompt_ids", ()))), **values)


def _mappings(values: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    if not all(isinstance(value, dict) for value in values):
        raise CorruptReplyError
    return tuple(values)


def _fault_of(observation: Observation) -> str:
    reward = observation.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"gave a reward that is {type(reward).__name__}, not a number"
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        return f"gave the reward {reward:g}; it has to be finite"
    if not isinstance(observation.text, str):
        return f"gave an observation that is {type(observation.text).__name__}, not a string"
    return ""


# What users' code returns.


def opening_of(prompt: Prompt, answer: Any) -> Opening:
    """What `open` returned as an Opening."""
    if isinstance(answer, Opening):
        return answer
    if answer is not None and not isinstance(answer, str):
        raise InvalidAnswerError(f"open returned {type(answer).__name__}; return an Opening, a text or None")
    return Opening(with_text(prompt_messages(prompt), answer or ""))


def prompt_messages(prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
    if prompt.messages is not None:
        return tuple(prompt.messages)
    return () if is_task(prompt) else ({"role": "user", "content": prompt.text},)


def with_text(messages: Sequence[Mapping[str, Any]], text: str) -> tuple[Mapping[str, Any], ...]:
    """The messages with a text appended to the last one, if it is the user's."""
    if not text:
        return tuple(messages)
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
        before = messages[-1]["content"]
        return (*messages[:-1], {**messages[-1], "content": f"{before}{text}"})
    return (*messages, {"role": "user", "content": text})


def observation_of(answer: Any) -> Observation:
    """What `step` or `result` returned as a valid Observation."""
    if isinstance(answer, bool | int | float):
        answer = Observation(reward=float(answer), done=True)
    elif isinstance(answer, str):
        answer = Observation(answer)
    elif isinstance(answer, Verdict):
        answer = Observation(reward=answer.score, done=True, correct=answer.correct)
    if not isinstance(answer, Observation):
        raise InvalidAnswerError(
            f"returned {type(answer).__name__}; return an Observation, a text, or a number to end with"
        )
    if fault := _fault_of(answer):
        raise InvalidAnswerError(fault)
    if len(answer.text) > MAX_TEXT:
        raise ObservationTooLongError(f"answered with {len(answer.text):,} characters; the limit is {MAX_TEXT:,}")
    return answer


def failure_of(name: str, error: BaseException) -> EpisodeFailure | UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, GoneError):
        return EpisodeFailure("lost", str(error))
    if isinstance(error, MemoryError):
        return EpisodeFailure("crashed", f"{name} ran out of memory (env.memory_mb)")
    if isinstance(error, AgentError):
        own = error.__cause__
        return EpisodeFailure("error", f"{error}\n{describe_traceback(own)}" if own is not None else str(error))
    if isinstance(error, InvalidAnswerError):
        return EpisodeFailure("error", f"{name}: {shorten(str(error))}")
    if isinstance(error, ObservationTooLongError):
        return EpisodeFailure("too_long", f"{name} {shorten(str(error))}")
    return EpisodeFailure("error", f"{name} raised {describe(error)}\n{describe_traceback(error)}")


# In the worker.


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
            prompt, seed = arguments
            _seed(seed)
            environment = self._environment(key) if self._stateless else self._factory()
            self._environments["" if self._stateless else key] = environment
            self._prompts[key] = prompt
            return _optional(environment, "open", prompt, seed)
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
            return opening_of(self._prompts[key], value)
        if operation == "close" or (operation == "result" and value is None):
            return Observation()
        return observation_of(value)

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


def environment_service(
    factory: Callable[[], Any], name: str, settings: EnvSettings, stateless: bool, is_async: bool
) -> Service:
    """The service of the workers of an environment. `factory` makes one for each episode."""
    host = Host(factory, name, stateless)
    loop = _Loop(host, settings.timeout_s) if is_async else None

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        if loop is not None:
            return loop.exchange(*pickle.loads(body))
        row = encode_result(_call(host, body))
        row["exhausted"] = row["kind"] == "failure" and is_short()
        return _bounded(row, name)

    return Service(answer, settings.memory_mb, name="environment", section="env")


def _call(host: Host, body: bytearray) -> Result:
    try:
        operation, key, arguments = pickle.loads(body)
        value = host.begin(operation, key, arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return host.end(operation, key, value)
    except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
        return host.failed(error)


async def _awaited(value: Any) -> Any:
    return await value


def _bounded(row: dict[str, Any], name: str) -> bytes:
    try:
        data = json.dumps(row).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps(
            encode_result(EpisodeFailure("error", f"{name} gave no JSON values: {describe(error)}"))
        ).encode()
    if len(data) <= MAX_REPLY // 2:
        return data
    detail = f"{name} answered with {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 21} MiB"
    return json.dumps(encode_result(EpisodeFailure("too_long", detail), exhausted=True)).encode()


class _Loop:
    """Asynchronous episodes, on an event loop in a thread of the worker. The worker's main thread exchanges calls and
    results with the run."""

    def __init__(self, host: Host, limit_s: float) -> None:
        self._host, self._limit_s = host, limit_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: dict[int, bytes] = {}
        self._some = threading.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def exchange(self, calls: Sequence[tuple[int, Operation, str, tuple[Any, ...]]], wait_s: float) -> bytes:
        """Starts calls, and returns the results that there are; if there are none, after a while."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="dapo-environments", daemon=True).start()
        for number, operation, key, arguments in calls:
            self._loop.call_soon_threadsafe(self._start, number, operation, key, arguments)
        with self._some:
            if not self._finished:
                self._some.wait(wait_s)
            finished, self._finished = self._finished, {}
        rows = b",".join(b'"%d":%s' % entry for entry in finished.items())
        return b"{%s}" % rows

    def _start(self, number: int, operation: Operation, key: str, arguments: tuple[Any, ...]) -> None:
        assert self._loop is not None
        self._tasks[number] = self._loop.create_task(self._run(number, operation, key, arguments))

    async def _run(self, number: int, operation: Operation, key: str, arguments: tuple[Any, ...]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                value = self._host.begin(operation, key, arguments)
                if inspect.isawaitable(value):
                    value = await value
            result = self._host.end(operation, key, value)
        except TimeoutError:
            result = EpisodeFailure("timeout", f"not answered within {self._limit_s:g} s (env.timeout_s)")
        except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
            result = self._host.failed(error)
        data = _bounded(encode_result(result), "the environment")
        with self._some:
            self._finished[number] = data
            self._some.notify()
        del self._tasks[number]


def seen_turn(turn: AssistantTurn, takes_tokens: bool) -> AssistantTurn:
    """The turn as an environment gets it."""
    if takes_tokens:
        return turn
    names = {f.name for f in fields(turn)} - {"token_ids", "logps", "prompt_ids"}
    return AssistantTurn(**{name: getattr(turn, name) for name in names})
