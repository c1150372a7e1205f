"""Runs environments in worker processes, concurrently with the run, with enforced limits on time and memory.

- Asynchronous environments share a process, in which many episodes are at work at a time.
- Others share processes (`env.workers`), each of which makes one call at a time. Calls of a stateless environment, such
  as a set of tools, go to any of them. An episode with a state stays in its process, alone as long as there are enough.

Whatever an environment does, each of its calls ends in a result or an `EpisodeFailure`, and only its own episode ends.
If its process is killed, deterministic environments that shared it are brought back in a new one.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

from dapo_rl.config import EnvSettings
from dapo_rl.envs.protocol import AssistantTurn, EpisodeFailure, FailureReason, Observation, Opening, ToolSchema
from dapo_rl.envs.service import (
    AtWork,
    Operation,
    Result,
    decode_result,
    encode_step,
    environment_service,
    opening_of,
    seen_turn,
)
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt
from dapo_rl.workers import Supervisor, WorkerClient, WorkerFailedError, WorkerGoneError
from dapo_rl.workers.worker import CorruptReplyError

TOOL_PROCESSES = 64
"""Processes for tools, at most: each makes one call at a time."""
MOST_THREADS = 4096
EXCHANGE_S = 0.01
"""How long a process with asynchronous environments waits for results before it takes new calls."""
CALL_GRACE_S = 2.0
"""Time beyond the limit of a call for the process to say that its event loop is blocked."""


class Environments(Protocol):
    """The environments of a run, by the names of episodes. Calls return futures of results, or raise a UserError."""

    deterministic: bool
    takes_tokens: bool
    """Whether turns are given with their tokens."""
    has_state: bool
    """Whether the last observation of an episode has a state for reward functions."""
    tools: Sequence[ToolSchema]
    """The tools of all episodes, where they are known before one begins."""

    def new_key(self) -> str:
        """The name of a new episode."""
        ...

    def open(self, key: str, prompt: Prompt, seed: int) -> Future[Result]: ...

    def step(self, key: str, turn: AssistantTurn) -> Future[Result]: ...

    def result(self, key: str) -> Future[Result]:
        """The last reward of an episode that a limit ends."""
        ...

    def close_episodes(self, keys: Collection[str]) -> None:
        """Ends episodes, whether they have ended or not."""
        ...

    def close(self) -> None:
        """Ends all processes."""
        ...


class EnvironmentPool:
    """The environments of a run. `factory` makes the environment of an episode; all its methods return futures."""

    def __init__(self, factory: Callable[[], Any], settings: EnvSettings, name: str = "environment") -> None:
        kind = getattr(factory, "environment", factory)
        self.name, self.settings = name, settings
        self.tools: Sequence[ToolSchema] = getattr(factory, "tools", ())
        self.deterministic = bool(getattr(kind, "deterministic", False))
        self.stateless = bool(getattr(kind, "stateless", False))
        self.takes_tokens = bool(getattr(kind, "takes_tokens", False))
        self.has_state = bool(getattr(kind, "has_state", False))
        self.is_async = is_async(kind)
        self._opens = hasattr(kind, "open")
        at_work = AtWork(settings.workers or 1) if self.is_async else None
        service = environment_service(factory, name, settings, self.stateless, at_work)
        self._supervisor = Supervisor(service)  # before any threads start
        self._calls: _SharedLoops | _Processes
        if at_work is not None:
            self._calls = _SharedLoops(self._supervisor, settings, at_work)
        else:
            self._calls = _Processes(self._supervisor, settings, self.stateless, self.deterministic)
        self._keys = itertools.count()
        self._close = weakref.finalize(self, _close, self._calls, self._supervisor, os.getpid())

    def new_key(self) -> str:
        return f"episode-{next(self._keys)}"

    def open(self, key: str, prompt: Prompt, seed: int) -> Future[Result]:
        if not self._opens:
            self._calls.begin(key)
            if self.stateless:
                return _at_hand(opening_of(prompt, None))
        return self._calls.call("open", key, (prompt, seed))

    def step(self, key: str, turn: AssistantTurn) -> Future[Result]:
        return self._calls.call("step", key, (seen_turn(turn, self.takes_tokens),))

    def result(self, key: str) -> Future[Result]:
        return self._calls.call("result", key, ())

    def close_episodes(self, keys: Collection[str]) -> None:
        for key in keys:
            self._calls.close(key)

    @property
    def open_episodes(self) -> int:
        return self._calls.open_episodes

    def close(self) -> None:
        self._close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_async(kind: Any) -> bool:
    """Whether an environment's methods are coroutine functions."""
    return any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("open", "step"))


def default_processes() -> int:
    """For environments that have a state: four for each core."""
    return min(max(4 * (os.cpu_count() or 1), 8), 64)


def _close(calls: _Processes | _SharedLoops, supervisor: Supervisor, run: int) -> None:
    if os.getpid() == run:
        calls.stop()
        supervisor.close()


def _at_hand(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _decode(data: bytearray) -> tuple[Result, bool]:
    row = _parse(data)
    return decode_result(row), row.get("exhausted") is True


def _parse(data: bytearray) -> dict[str, Any]:
    """A reply as a dict whose strings can be encoded."""
    try:
        row = json.loads(data)
        if b"\\u" in data:  # only so can a lone surrogate be written
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise CorruptReplyError from None
    if not isinstance(row, dict):
        raise CorruptReplyError
    return row


class _Process:
    """A process and the episodes that it has."""

    def __init__(self, client: WorkerClient) -> None:
        self.client, self.lock = client, threading.Lock()
        self.episodes: set[str] = set()


class _Processes:
    """Processes that episodes share, one call at a time each. An episode stays in its process; if that ends by the call
    of another episode, a deterministic environment is opened again elsewhere and given the same turns."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, stateless: bool, deterministic: bool) -> None:
        self._supervisor, self._settings = supervisor, settings
        self._stateless, self._deterministic = stateless, deterministic
        self._most = settings.workers or (TOOL_PROCESSES if stateless else default_processes())
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="dapo-environment")
        self._processes: list[_Process] = []
        self._episodes: dict[str, _Process | None] = {}
        self._history: dict[str, list[tuple[bytes, Result]]] = {}
        self._lock = threading.Lock()

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def begin(self, key: str) -> None:
        with self._lock:
            self._episodes.setdefault(key, None)

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        if operation == "open":
            self.begin(key)
        return self._threads.submit(self._call, operation, key, arguments)

    def close(self, key: str) -> None:
        with self._lock:
            self._history.pop(key, None)
            if key not in self._episodes:
                return
            process = self._episodes.pop(key)
        if process is not None:
            self._threads.submit(self._end, process, key)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _process_of(self, key: str) -> tuple[_Process | None, bool]:
        """The process of an episode, or for a new one that with the fewest episodes; and whether it is new there. None
        if the episode was given up."""
        with self._lock:
            if key not in self._episodes:
                return None, False
            process = self._episodes[key]
            if process is not None:
                return process, False
            process = min(self._processes, key=lambda each: len(each.episodes), default=None)
            if process is None or (process.episodes and len(self._processes) < self._most):
                process = _Process(WorkerClient(self._supervisor, self._settings.timeout_s))
                self._processes.append(process)
            process.episodes.add(key)
            if not self._stateless:
                self._episodes[key] = process
            return process, True

    def _call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Result:
        body = encode_step(operation, key, *arguments)
        process, is_new = self._process_of(key)
        if process is None:
            return EpisodeFailure("lost", "the episode was given up")
        result: Result
        try:
            with process.lock:
                result = self._send(process, body, is_new)
                if isinstance(result, EpisodeFailure) and result.reason == "lost" and self._replayed(process, key):
                    result = self._send(process, body, is_new=False)
        finally:
            if self._stateless:
                with self._lock:
                    process.episodes.discard(key)
        if isinstance(result, UserError):
            raise result
        if isinstance(result, EpisodeFailure) and result.reason == "lost":
            result = EpisodeFailure(
                "crashed", "its process was ended by the call of another episode; raise env.workers"
            )
        if self._deterministic and not self._stateless and not isinstance(result, EpisodeFailure):
            with self._lock:
                if key in self._episodes:
                    self._history.setdefault(key, []).append((body, result))
        return result

    def _send(self, process: _Process, body: bytes, is_new: bool) -> Result:
        client = process.client
        try:
            result, exhausted = client.call(body, _decode, retry=is_new)
            if exhausted:
                client.kill()
            elif not isinstance(result, EpisodeFailure | UserError):
                self._supervisor.call_went_well()
            return result
        except WorkerGoneError:
            return EpisodeFailure("lost", "")
        except WorkerFailedError as error:
            if error.status == "timeout":
                return EpisodeFailure("timeout", f"not answered within {self._settings.timeout_s:g} s (env.timeout_s)")
            return EpisodeFailure("crashed", str(error))
        except UserError as error:
            return error

    def _replayed(self, process: _Process, key: str) -> bool:
        """Whether an episode is back where it was, in the new process."""
        if not self._deterministic or not (history := self._history.get(key)):
            return False
        return all(self._send(process, body, is_new=i == 0) == before for i, (body, before) in enumerate(history))

    def _end(self, process: _Process, key: str) -> None:
        """Lets an environment clean up."""
        with process.lock:
            if process.client.worker is not None:
                self._send(process, encode_step("close", key), is_new=False)
        with self._lock:
            process.episodes.discard(key)


class _SharedLoops:
    """Processes with an event loop each, which episodes share."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, at_work: AtWork) -> None:
        self._hosts = [_SharedLoop(supervisor, settings, at_work, i) for i in range(settings.workers or 1)]
        self._next = itertools.cycle(self._hosts)
        self._episodes: dict[str, _SharedLoop] = {}

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def begin(self, key: str) -> None:
        self._episodes.setdefault(key, next(self._next))

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        if operation == "open":
            self.begin(key)
        if (host := self._episodes.get(key)) is None:
            return _at_hand(EpisodeFailure("lost", "the episode was given up"))
        return host.call(operation, key, arguments)

    def close(self, key: str) -> None:
        if (host := self._episodes.pop(key, None)) is not None:
            host.call("close", key, ())

    def stop(self) -> None:
        for host in self._hosts:
            host.stop()


class _SharedLoop:
    """The run's side of a process with an event loop: a thread hands over calls, and collects results."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, at_work: AtWork, index: int) -> None:
        self._supervisor, self._settings = supervisor, settings
        self._at_work, self._index = at_work, index
        self._calls: queue.SimpleQueue[tuple[Operation, str, tuple[Any, ...], Future[Result]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[int, Future[Result]] = {}
        self._started: dict[int, float] = {}
        self._numbers = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._stopped = False

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._exchange, name="dapo-environments", daemon=True)
            self._thread.start()
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        self._calls.put((operation, key, arguments, future))
        return future

    def stop(self) -> None:
        self._stopped = True
        self._calls.put(None)

    def _exchange(self) -> None:
        try:
            self._exchange_all()
        finally:
            self._stopped = True
            self._calls.put(None)
            self._new_calls()
            self._fail(RuntimeError("the environments are closed"))

    def _exchange_all(self) -> None:
        client = WorkerClient(self._supervisor, self._settings.timeout_s + CALL_GRACE_S)
        while not self._stopped:
            new = self._new_calls()
            if not new and not self._waiting:
                continue
            body = pickle.dumps((self._index, new, EXCHANGE_S), pickle.HIGHEST_PROTOCOL)
            try:
                finished, ends = client.call(body, _decode_all)
                self._supervisor.call_went_well()
            except WorkerFailedError as error:
                self._lose("timeout" if error.status == "timeout" else "crashed", str(error))
                continue
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, UserError):
                    raise
                continue
            for number, result in finished.items():
                future = self._waiting.pop(number, None)
                if future is None:
                    continue
                if isinstance(result, UserError):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            if ends == "memory":
                client.kill()
                self._lose("lost", "its process ran out of memory by the call of another episode (env.memory_mb)")
            elif ends or self._is_late():
                client.kill()
                limit_s = self._settings.timeout_s
                self._lose("timeout", f"blocked the event loop for more than {limit_s:g} s (env.timeout_s)")

    def _is_late(self) -> bool:
        """Whether the process has said nothing of a call whose time is over, for example as user code wrote to its
        socket."""
        self._started = {number: self._started[number] for number in self._waiting}
        first = min(self._started.values(), default=math.inf)
        return time.monotonic() - first > self._settings.timeout_s + 2 * CALL_GRACE_S

    def _new_calls(self) -> list[tuple[int, Operation, str, tuple[Any, ...]]]:
        """The calls that came since the last time; waits for one if no other call is being made."""
        new: list[tuple[int, Operation, str, tuple[Any, ...]]] = []
        waits = not self._waiting
        while True:
            try:
                call = self._calls.get(block=waits)
            except queue.Empty:
                return new
            if call is None:
                return new
            waits = False
            operation, key, arguments, future = call
            number = next(self._numbers)
            self._waiting[number], self._started[number] = future, time.monotonic()
            new.append((number, operation, key, arguments))

    def _lose(self, reason: FailureReason, detail: str) -> None:
        """Ends all calls, as the process has ended, by the one that it was working at, if that is known."""
        guilty = self._waiting.pop(self._at_work.get(self._index), None)
        self._at_work.set(self._index, 0)
        if guilty is not None:
            guilty.set_result(EpisodeFailure(reason, detail))
            reason, detail = "lost", f"its process was ended by the call of another episode: {detail}"
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result(EpisodeFailure(reason, detail))

    def _fail(self, error: BaseException) -> None:
        """Ends all calls, and the run."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(error)


def _decode_all(data: bytearray) -> tuple[dict[int, Result], str]:
    """The results of calls, and why the process has to be killed, if it has to be."""
    row = _parse(data)
    try:
        results = {int(number): decode_result(result) for number, result in row["results"].items()}
    except (ValueError, AttributeError, KeyError):
        raise CorruptReplyError from None
    return results, str(row.get("ends", ""))


__all__ = ["EnvironmentPool", "Observation", "Opening", "is_async"]
