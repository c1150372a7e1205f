"""Asynchronous environments in processes with an event loop each, which episodes share."""

from __future__ import annotations

import itertools
import math
import pickle
import queue
import threading
import time
from concurrent.futures import Future
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.event_loop import AtWork
from dapo_rl.envs.protocol import EpisodeFailure, FailureReason
from dapo_rl.envs.replies import Operation, Result, decode_result, parse_reply
from dapo_rl.errors import UserError
from dapo_rl.workers import Supervisor, WorkerClient, WorkerFailedError
from dapo_rl.workers.worker import CorruptReplyError

EXCHANGE_S = 0.01
"""How long a process with asynchronous environments waits for results before it takes new calls."""
CALL_GRACE_S = 2.0
"""Time beyond the limit of a call for the process to say that its event loop is blocked."""


class SharedLoops:
    """Processes with an event loop each, which episodes share."""

    def __init__(self, supervisor: Supervisor, settings: EnvSettings, at_work: AtWork) -> None:
        self._hosts = [_SharedLoop(supervisor, settings, at_work, i) for i in range(settings.workers or 1)]
        self._next = itertools.cycle(self._hosts)
        self._episodes: dict[str, _SharedLoop] = {}

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def begin(self, key: str) -> None:
        if key not in self._episodes:
            self._episodes[key] = next(self._next)

    def call(self, operation: Operation, key: str, arguments: tuple[Any, ...]) -> Future[Result]:
        if operation == "open":
            self.begin(key)
        if (host := self._episodes.get(key)) is None:
            return finished(EpisodeFailure("lost", "the episode was given up"))
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
        guilty = self._waiting.pop(self._at_work[self._index], None)
        self._at_work[self._index] = 0
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
    row = parse_reply(data)
    try:
        results = {int(number): decode_result(result) for number, result in row["results"].items()}
    except (ValueError, AttributeError, KeyError):
        raise CorruptReplyError from None
    return results, str(row.get("ends", ""))


def finished(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
