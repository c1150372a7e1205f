"""Environments as the service of worker processes: calls and replies as bytes, and how a worker answers.

A call is pickled, since it comes from the run. A reply is JSON and is validated, since user code has access to the
worker's end of the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import mmap
import os
import pickle
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Literal, get_args

from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, describe_traceback, shorten, shown
from dapo_rl.config import EnvSettings
from dapo_rl.data.tasks import is_task
from dapo_rl.envs.protocol import (
    AgentError,
    AssistantTurn,
    EpisodeFailure,
    FailureReason,
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
OUT_OF_MEMORY = b"ran out of memory (env.memory_mb)"
MAX_REWARD = 1e6
MAX_TOKEN = 2**31

Operation = Literal["open", "step", "result", "close"]
Result = Opening | Observation | EpisodeFailure | UserError
REASONS = get_args(FailureReason)
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
            line, more = (shorten(str(values[name]), TRACEBACK_LIMIT) for name in ("line", "more"))
            return UserError(line, more)
        if kind == "failure":
            return _failure(**values)
        if kind == "opening":
            return _opening(values)
        if kind != "observation":
            raise CorruptReplyError
        if values.get("conversation") is not None:
            values["conversation"] = _opening(values["conversation"])
        values["messages"] = tuple(values.get("messages", ()))
        values["prompt_ids"] = tuple(values.get("prompt_ids", ()))
        observation = Observation(**values)
        if _fault_of(observation):
            raise CorruptReplyError
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError):
        raise CorruptReplyError from None
    return observation


def _failure(reason: FailureReason, detail: str) -> EpisodeFailure:
    if reason not in REASONS or not isinstance(detail, str):
        raise CorruptReplyError
    return EpisodeFailure(reason, shorten(detail, 2 * TRACEBACK_LIMIT))


def _opening(values: Mapping[str, Any]) -> Opening:
    values = dict(values)
    messages, tools, ids = (tuple(values.pop(name, ())) for name in ("messages", "tools", "prompt_ids"))
    opening = Opening(messages, tools, ids, **values)
    if _fault_of_opening(opening):
        raise CorruptReplyError
    return opening


def _fault_of(observation: Observation) -> str:
    reward = observation.reward
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"gave a reward that is {type(reward).__name__}, not a number"
    if not -MAX_REWARD <= reward <= MAX_REWARD:
        return f"gave the reward {shown(reward)}; it has to be finite, and at most {MAX_REWARD:g}"
    if not isinstance(observation.text, str):
        return f"gave an observation that is {type(observation.text).__name__}, not a string"
    if not isinstance(observation.done, bool) or not isinstance(observation.correct, bool | None):
        return "gave an observation whose `done` or `correct` is not True or False"
    if not _is_count(observation.tool_calls) or not _is_count(observation.tool_errors):
        return "gave an observation whose `tool_calls` or `tool_errors` is not a number of calls"
    if not isinstance(observation.state, Mapping):
        return "gave an observation whose `state` is not a dict"
    told = observation.conversation
    if told is not None and not isinstance(told, Opening):
        return "gave an observation whose `conversation` is not an Opening"
    parts = Opening(observation.messages, (), observation.prompt_ids, observation.max_tokens)
    return _fault_of_opening(parts) or (_fault_of_opening(told) if told is not None else "")


def _fault_of_opening(opening: Opening) -> str:
    if not _has_only(opening.messages, lambda message: isinstance(message, Mapping) and _is_message(message)):
        return "gave messages that are not dicts with a `role` and a `content`, as chat templates have them"
    if not _has_only(opening.tools, lambda tool: isinstance(tool, Mapping)):
        return "gave tools that are not dicts"
    if not _has_only(opening.prompt_ids, lambda token: _is_count(token) and token < MAX_TOKEN):
        return "gave `prompt_ids` that are not tokens"
    if opening.max_tokens is not None and not (_is_count(opening.max_tokens) and opening.max_tokens):
        return f"gave the max_tokens {shown(opening.max_tokens)}; it is a number above 0, or None"
    return ""


def _has_only(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes) and all(map(fits, values))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_message(message: Mapping[str, Any]) -> bool:
    content, calls = message.get("content"), message.get("tool_calls") or ()
    is_content = isinstance(content, str | None) or _has_only(content, lambda part: isinstance(part, str | Mapping))
    return isinstance(message.get("role"), str) and is_content and _has_only(calls, lambda x: isinstance(x, Mapping))


# What users' code returns.


def opening_of(prompt: Prompt, answer: Any) -> Opening:
    """What `open` returned as an Opening."""
    if isinstance(answer, Opening):
        if fault := _fault_of_opening(answer):
            raise InvalidAnswerError(fault)
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
    answer = _plain(answer)
    if isinstance(answer, bool | int | float):
        answer = Observation(reward=float(answer), done=True)
    elif isinstance(answer, str):
        answer = Observation(answer)
    elif isinstance(answer, Verdict):
        answer = Observation(reward=_plain(answer.score), done=True, correct=_plain(answer.correct))
    elif isinstance(answer, Observation):
        answer = replace(answer, reward=_plain(answer.reward), correct=_plain(answer.correct), done=_plain(answer.done))
    if not isinstance(answer, Observation):
        raise InvalidAnswerError(
            f"returned {type(answer).__name__}; return an Observation, a text, or a number to end with"
        )
    if fault := _fault_of(answer):
        raise InvalidAnswerError(fault)
    if len(answer.text) > MAX_TEXT:
        raise ObservationTooLongError(f"answered with {len(answer.text):,} characters; the limit is {MAX_TEXT:,}")
    return answer


def _plain(value: Any) -> Any:
    """A scalar of NumPy or torch as a number."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def failure_of(name: str, error: BaseException) -> EpisodeFailure | UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, GoneError):
        return EpisodeFailure("lost", str(error))
    if isinstance(error, MemoryError):
        return EpisodeFailure("crashed", f"{name} {OUT_OF_MEMORY.decode()}")
    if isinstance(error, AgentError):
        own = error.__cause__
        return EpisodeFailure("error", f"{error}\n{describe_traceback(own)}" if own is not None else str(error))
    if isinstance(error, InvalidAnswerError):
        return EpisodeFailure("error", f"{name}: {shorten(str(error))}")
    if isinstance(error, ObservationTooLongError):
        return EpisodeFailure("too_long", f"{name} {shorten(str(error))}")
    try:
        return EpisodeFailure("error", f"{name} raised {describe(error)}\n{describe_traceback(error)}")
    except BaseException:  # of the exception's own methods
        return EpisodeFailure("error", f"{name} raised an exception that cannot be shown")


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
    factory: Callable[[], Any], name: str, settings: EnvSettings, stateless: bool, at_work: AtWork | None
) -> Service:
    """The service of the workers of an environment. `factory` makes one for each episode. `at_work`: of asynchronous
    environments."""
    host = Host(factory, name, stateless)
    loop = None if at_work is None else _Loop(host, settings.timeout_s, at_work)

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        if loop is not None:
            return loop.exchange(is_short, *pickle.loads(body))
        row = _call(host, body)
        row["exhausted"] = row["kind"] == "failure" and is_short()
        return _bounded(row, name)

    return Service(answer, settings.memory_mb, name="environment", section="env")


def _call(host: Host, body: bytearray) -> dict[str, Any]:
    try:
        operation, key, arguments = pickle.loads(body)
        value = host.begin(operation, key, arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return encode_result(host.end(operation, key, value))
    except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
        return encode_result(host.failed(error))


async def _awaited(value: Any) -> Any:
    return await value


def _bounded(row: dict[str, Any], name: str) -> bytes:
    try:
        data = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps(
            encode_result(EpisodeFailure("error", f"{name} gave no JSON values: {describe(error)}"))
        ).encode()
    if len(data) <= MAX_REPLY // 2:
        return data
    detail = f"{name} answered with {len(data) >> 20} MiB; the limit is {MAX_REPLY >> 21} MiB"
    return json.dumps(encode_result(EpisodeFailure("too_long", detail), exhausted=True)).encode()


class AtWork:
    """Tells the run which call the event loop of each process was working at when it blocked or ended."""

    def __init__(self, processes: int) -> None:
        self._cells = mmap.mmap(-1, 8 * processes)  # shared by the run and its workers

    def set(self, process: int, number: int) -> None:
        """Calls are numbered from 1; 0: none."""
        self._cells[8 * process : 8 * process + 8] = number.to_bytes(8)

    def get(self, process: int) -> int:
        return int.from_bytes(self._cells[8 * process : 8 * process + 8])


class _Loop:
    """Asynchronous episodes, on an event loop in a thread of the worker. The worker's main thread exchanges calls and
    results with the run."""

    def __init__(self, host: Host, limit_s: float, at_work: AtWork) -> None:
        self._host, self._limit_s, self._at_work = host, limit_s, at_work
        self._process = self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._finished: dict[int, bytes] = {}
        self._some = threading.Condition()
        self._tasks: dict[int, tuple[str, asyncio.Task[Result]]] = {}
        """The calls that are being made, with their episodes."""
        self._asked: float | None = None
        """When the loop was asked for a sign of life, unless it has given one."""

    def exchange(
        self,
        is_short: Callable[[], bool],
        process: int,
        calls: Sequence[tuple[int, Operation, str, tuple[Any, ...]]],
        wait_s: float,
    ) -> bytes:
        """Starts calls, and returns the results that there are; if there are none, after a while. Asks to be killed if
        the loop is blocked or has ended, or memory is short."""
        loop = self._running_loop(process)
        for call in calls:
            loop.call_soon_threadsafe(self._start, *call)
        with self._some:
            if not self._finished:
                self._some.wait(wait_s)
            finished, self._finished = self._finished, {}
        ends = b""
        if any(OUT_OF_MEMORY in data for data in finished.values()) and is_short():
            ends = b"memory"
        elif self._is_blocked(loop):
            ends = b"blocked"
        rows = b",".join(b'"%d":%s' % entry for entry in finished.items())
        return b'{"results":{%s},"ends":"%s"}' % (rows, ends)

    def _running_loop(self, process: int) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._process, self._pid = process, os.getpid()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run_loop, args=(self._loop,), name="dapo-environments", daemon=True
            )
            self._thread.start()
        return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            with contextlib.suppress(BaseException):  # a user's task may stop the loop, or raise SystemExit
                loop.run_forever()

    def _is_blocked(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the loop does nothing else while a call takes more time than it may."""
        assert self._thread is not None
        asked, now = self._asked, time.monotonic()
        if asked is None:
            asked = self._asked = now
            with contextlib.suppress(RuntimeError):  # it was closed
                loop.call_soon_threadsafe(self._show_life)
        return not self._thread.is_alive() or now - asked > self._limit_s

    def _show_life(self) -> None:
        self._asked = None

    def _start(self, number: int, operation: Operation, key: str, arguments: tuple[Any, ...]) -> None:
        assert self._loop is not None
        if operation == "close":  # also an episode that is given up in the middle of a call
            for _, task in [entry for entry in self._tasks.values() if entry[0] == key]:
                task.cancel()
        task = self._loop.create_task(self._run(number, operation, key, arguments))
        self._tasks[number] = key, task
        timer = self._loop.call_later(self._limit_s, self._late, number)
        task.add_done_callback(lambda task: self._ended(number, task, timer))

    async def _run(self, number: int, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Result:
        def begin() -> Any:
            return self._host.begin(operation, key, arguments)

        try:
            return self._host.end(operation, key, await self._observed(number, begin))
        except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
            return self._host.failed(error)

    @types.coroutine
    def _observed(self, number: int, begin: Callable[[], Any]) -> Generator[Any, Any, Any]:
        """Runs a call, and tells the run when the loop is working at it."""
        work: Generator[Any, Any, Any] | None = None
        sent: Any = None
        error: BaseException | None = None
        while True:
            self._at_work.set(self._process, number)
            try:
                if work is None:
                    value = begin()
                    if not inspect.isawaitable(value):
                        return value
                    work = _awaited(value)  # type: ignore[assignment]
                    assert work is not None
                yielded = work.send(sent) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                self._at_work.set(self._process, 0)
            try:
                sent, error = (yield yielded), None
            except BaseException as thrown:
                sent, error = None, thrown

    def _late(self, number: int) -> None:
        """Cancels a call. If it goes on in spite of that, nobody waits for it."""
        _, task = self._tasks.pop(number)
        task.cancel()
        late = EpisodeFailure("timeout", f"not answered within {self._limit_s:g} s (env.timeout_s)")
        self._finish(number, late)

    def _ended(self, number: int, task: asyncio.Task[Result], timer: asyncio.TimerHandle) -> None:
        if os.getpid() != self._pid:  # a copy that user code forked and let return
            os._exit(0)
        timer.cancel()
        if self._tasks.pop(number, None) is not None:
            failure = EpisodeFailure("error", "the call was cancelled")
            self._finish(number, failure if task.cancelled() else task.result())

    def _finish(self, number: int, result: Result) -> None:
        try:
            data = _bounded(encode_result(result), "the environment")
        except BaseException as error:  # of values whose own methods raise
            data = _bounded(encode_result(self._host.failed(error)), "the environment")
        with self._some:
            self._finished[number] = data
            self._some.notify()


def seen_turn(turn: AssistantTurn, takes_tokens: bool) -> AssistantTurn:
    """The turn as an environment gets it."""
    if takes_tokens:
        return turn
    names = {f.name for f in fields(turn)} - {"token_ids", "logps", "prompt_ids"}
    return AssistantTurn(**{name: getattr(turn, name) for name in names})
