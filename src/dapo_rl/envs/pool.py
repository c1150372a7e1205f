"""Runs environments in worker processes, concurrently with the run, with enforced limits on time and memory.

- An asynchronous environment shares a process with many others.
- A stateless one, such as a set of tools, shares a few processes with others, one call at a time each.
- Any other has a process for each episode.

Whatever an environment does, each of its calls ends in a result or a `Failure`, and only its own episode ends; where
episodes share a process, so do those whose process it takes along.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.protocol import AssistantTurn, Failure, Observation, Opening
from dapo_rl.envs.service import (
    Operation,
    Result,
    decode_result,
    encode_call,
    environment_service,
    opening_of,
    seen_turn,
)
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt
from dapo_rl.workers import Supervisor, WorkerClient, WorkerFailedError
from dapo_rl.workers.worker import CorruptReplyError

SHARED_PROCESSES = 32
MOST_PROCESSES = 4096
EXCHANGE_S = 0.01
"""How long a process with asynchronous environments waits for results before it takes new calls."""
CALL_GRACE_S = 2.0
"""Time beyond the limit of a call for the event loop to cancel it."""


class EnvironmentPool:
    """The environments of a run. `factory` makes the environment of an episode; all its methods return futures."""

    def __init__(self, factory: Callable[[], Any], settings: EnvSettings, name: str = "environment") -> None:
        kind = factory if inspect.isclass(factory) else getattr(factory, "environment", factory)
        self.name, self.settings = name, settings
        self.deterministic = bool(getattr(kind, "deterministic", False))
        self.stateless = bool(getattr(kind, "stateless", False))
        self.takes_tokens = bool(getattr(kind, "takes_tokens", False))
        self.is_async = is_async(kind)
        self._opens = hasattr(kind, "open")
        service = environment_service(factory, name, settings, self.stateless, self.is_async)
        self._supervisor = Supervisor(service)  # before any threads start
        backend = _SharedLoops if self.is_async else _Processes
        self._calls = backend(self._supervisor, settings, self.stateless)
        self._keys = itertools.count()
        self._close = weakref.finalize(self, _close, self._calls, self._supervisor, os.getpid())

    def new_key(self) -> str:
        """The name of a new episode."""
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
        """The last reward of an episode that a limit ends."""
        return self._calls.call("result", key, ())

    def close_episodes(self, keys: Collection[str]) -> None:
        """Ends episodes, whether they have ended or not."""
        for key in keys:
            self._calls.close(key)

    @property
    def open_episodes(self) -> int:
        return self._calls.open_episodes

    def close(self) -> None:
        """Ends all processes."""
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


def _close(calls: _Processes | _SharedLoops, supervisor: Supervisor, run: int) -> None:
    if os.getpid() == run:
        calls.stop()
        supervisor.close()


def _at_hand(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _decode(data: bytearray) -> tuple[Result, bool]:
    try:
        row = json.loads(data)
        return decode_result(row), row.get("exhausted") is True
    except (ValueError, AttributeError, RecursionError):
        raise CorruptReplyError from None


class _Processes:
    """One process for each episode, or for each call of stateless environments."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, stateless: bool) -> None:
        self._supervisor, self._settings, self._stateless = supervisor, settings, stateless
        count = (settings.workers or SHARED_PROCESSES) if stateless else MOST_PROCESSES
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="dapo-environment")
        self._idle: list[WorkerClient] = []
        self._episodes: dict[str, WorkerClient | None] = {}
        self._lock = threading.Lock()

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def begin(self, key: str) -> None:
        with self._lock:
            self._episodes.setdefault(key, None)

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        self.begin(key)
        return self._threads.submit(self._call, operation, key, arguments)

    def close(self, key: str) -> None:
        with self._lock:
            if key not in self._episodes:
                return
            client = self._episodes.pop(key)
        if client is not None:
            self._threads.submit(self._end, client, key)

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Result:
        with self._lock:
            client = self._episodes.get(key)
            is_new = client is None
            if client is None:
                client = self._idle.pop() if self._idle else WorkerClient(self._supervisor, self._settings.timeout_s)
                if not self._stateless and key in self._episodes:
                    self._episodes[key] = client
        try:
            body = encode_call(operation, key, *arguments)
            result, exhausted = client.call(body, _decode, retry=is_new and operation == "open")
            if exhausted:
                client.kill()
            elif not isinstance(result, Failure | UserError):
                self._supervisor.call_went_well()
        except WorkerFailedError as error:
            result = Failure("timeout" if error.status == "timeout" else "crashed", str(error))
        except UserError as error:
            result = error
        finally:
            if self._stateless:
                with self._lock:
                    self._idle.append(client)
        if isinstance(result, UserError):
            raise result
        return result

    def _end(self, client: WorkerClient, key: str) -> None:
        """Lets an environment clean up, and keeps its process for another one."""
        try:
            if client.worker is not None:
                client.call(encode_call("close", key), _decode, retry=False)
        except (WorkerFailedError, UserError):
            client.kill()
        with self._lock:
            self._idle.append(client)


class _SharedLoops:
    """Processes with an event loop each, which episodes share."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, stateless: bool) -> None:
        self._hosts = [_SharedLoop(supervisor, settings) for _ in range(settings.workers or 1)]
        self._next = itertools.cycle(self._hosts)
        self._episodes: dict[str, _SharedLoop] = {}

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def begin(self, key: str) -> None:
        self._episodes.setdefault(key, next(self._next))

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        self.begin(key)
        return self._episodes[key].call(operation, key, arguments)

    def close(self, key: str) -> None:
        if (host := self._episodes.pop(key, None)) is not None:
            host.call("close", key, ())

    def stop(self) -> None:
        for host in self._hosts:
            host.stop()


class _SharedLoop:
    """The run's side of a process with an event loop: a thread hands over calls, and collects results."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings) -> None:
        self._supervisor, self._settings = supervisor, settings
        self._calls: queue.SimpleQueue[tuple[Operation, str, tuple[Any, ...], Future[Result]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: dict[int, Future[Result]] = {}
        self._numbers = itertools.count()
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
        client = WorkerClient(self._supervisor, self._settings.timeout_s + CALL_GRACE_S)
        while not self._stopped:
            new = self._new_calls()
            if not new and not self._waiting:
                continue
            body = pickle.dumps((new, EXCHANGE_S), pickle.HIGHEST_PROTOCOL)
            try:
                finished = client.call(body, _decode_all)
                self._supervisor.call_went_well()
            except WorkerFailedError as error:
                self._fail(Failure("timeout" if error.status == "timeout" else "crashed", str(error)))
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
            self._waiting[number] = future
            new.append((number, operation, key, arguments))

    def _fail(self, error: Failure | BaseException) -> None:
        """Ends all calls. The process is gone, and with it its episodes."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if isinstance(error, Failure):
                future.set_result(error)
            else:
                future.set_exception(error)


def _decode_all(data: bytearray) -> dict[int, Result]:
    try:
        rows = json.loads(data)
        return {int(number): decode_result(row) for number, row in rows.items()}
    except (ValueError, AttributeError, RecursionError):
        raise CorruptReplyError from None


__all__ = ["EnvironmentPool", "Observation", "Opening", "is_async"]
