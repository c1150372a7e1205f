"""Asynchronous environments on an event loop in a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import mmap
import os
import threading
import time
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from dapo_rl.envs.host import Host, awaited
from dapo_rl.envs.protocol import EpisodeFailure
from dapo_rl.envs.replies import OUT_OF_MEMORY, Operation, Result, encode_bounded, encode_result
from dapo_rl.workers.limits import MAX_REPLY

AtWork = memoryview
_REPLY_FRAME, _RESULT_FRAME = 64, 32
"""Bytes, at most, around the results of a reply and around each of them."""


def calls_at_work(processes: int) -> AtWork:
    """Tells the run which call the event loop of each process was working at when it blocked or ended. Calls are
    numbered from 1; 0: none."""
    return memoryview(mmap.mmap(-1, 8 * processes)).cast("Q")  # shared by the run and its workers


class EventLoop:
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
            finished = self._take_finished()
        ends = b""
        if any(OUT_OF_MEMORY in data for data in finished.values()) and is_short():
            ends = b"memory"
        elif self._is_blocked(loop):
            ends = b"blocked"
        rows = b",".join(b'"%d":%s' % entry for entry in finished.items())
        return b'{"results":{%s},"ends":"%s"}' % (rows, ends)

    def _take_finished(self) -> dict[int, bytes]:
        """The results for a reply. What would make it too long stays for the next one."""
        taken: dict[int, bytes] = {}
        room = MAX_REPLY - _REPLY_FRAME
        for number, data in self._finished.items():
            room -= len(data) + _RESULT_FRAME
            if taken and room < 0:
                break
            taken[number] = data
        self._finished = {number: data for number, data in self._finished.items() if number not in taken}
        return taken

    def _running_loop(self, process: int) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._process, self._pid = process, os.getpid()
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run_loop, args=(self._loop,), daemon=True)
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
            self._at_work[self._process] = number
            try:
                if work is None:
                    value = begin()
                    if not inspect.isawaitable(value):
                        return value
                    work = awaited(value)  # type: ignore[assignment]
                    assert work is not None
                yielded = work.send(sent) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                self._at_work[self._process] = 0
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
            data = encode_bounded(encode_result(result), "the environment")
        except BaseException as error:  # of values whose own methods raise
            data = encode_bounded(encode_result(self._host.failed(error)), "the environment")
        with self._some:
            self._finished[number] = data
            self._some.notify()
