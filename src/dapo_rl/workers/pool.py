"""Calls to workers: a client replaces its worker when it was killed or died; a pool has a thread for each client."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from dapo_rl.workers.supervisor import (
    OUT_OF_MEMORY,
    OUT_OF_SHARED_MEMORY,
    ForkServerGoneError,
    Supervisor,
    WorkerDiedError,
)
from dapo_rl.workers.worker import CorruptReplyError, Service, Worker

Result = TypeVar("Result")

GRACE_S = 0.25
"""Extra time for a service that enforces the limit itself, as the math verifier does."""


class WorkerFailedError(Exception):
    """A call without a reply: the worker was killed, died, or sent something other than a reply."""

    def __init__(self, status: Literal["timeout", "error"], detail: str) -> None:
        super().__init__(detail)
        self.status = status


class WorkerGoneError(WorkerFailedError):
    """The worker had ended before the call."""


class WorkerClient:
    """One worker at a time, forked at the first call and again after it was killed or died.

    To call a stateful service, such as an environment, keep the client for the whole episode and pass `retry=False`
    after the first call: a new worker has none of the state.
    """

    def __init__(self, supervisor: Supervisor, limit_s: float) -> None:
        self.supervisor = supervisor
        self._limit_s = limit_s
        self._name = supervisor.service.name
        self.worker: Worker | None = None

    def call(self, body: bytes, decode: Callable[[bytearray], Result], retry: bool = True) -> Result:
        """The decoded reply; raises WorkerFailedError. `decode` raises CorruptReplyError for an invalid one."""
        if not retry and (self.worker is None or self.worker.has_ended()):
            if self.worker is not None:
                self.kill()
            raise WorkerGoneError("error", f"the {self._name}'s process has ended since the last call")
        failure, twice = "", ", twice" if retry else ""
        for _ in range(2 if retry else 1):
            try:
                return self._call(self._living_worker(), body, decode)
            except ForkServerGoneError:  # the worker died with it; the call is probably not at fault
                self.worker = None
                failure = f"the process that forks the {self._name}'s workers died during the call{twice}"
            except WorkerDiedError:
                failure = f"the {self._name}'s process died at its start{twice} (is the machine out of memory?)"
        self.supervisor.check()
        raise WorkerFailedError("error", failure)

    def kill(self) -> None:
        """Kills the worker and everything that it started; the next call gets a new one."""
        with contextlib.suppress(ForkServerGoneError):
            self._kill()

    def leave(self) -> None:
        """Hangs up, so that the worker ends."""
        if self.worker is not None:
            self.worker.hang_up()
            self.worker = None

    def _living_worker(self) -> Worker:
        if self.worker is not None and self.worker.has_ended():
            self.kill()  # it ended between two calls, so the next call is not at fault
        if self.worker is None:
            self.worker = self.supervisor.spawn()
        return self.worker

    def _call(self, worker: Worker, body: bytes, decode: Callable[[bytearray], Result]) -> Result:
        try:
            return worker.call(body, self._limit_s + GRACE_S, decode)
        except TimeoutError:
            self.kill()
            raise WorkerFailedError("timeout", f"killed: not decided within {self._limit_s:g} s") from None
        except CorruptReplyError:
            self.kill()
            hint = f"does the {self._name} write to file descriptors that it did not open?"
            detail = f"the {self._name}'s process sent something other than a reply; {hint}"
            raise WorkerFailedError("error", detail) from None
        except EOFError:
            raise WorkerFailedError("error", f"the {self._name}'s process {self._death(self._kill())}") from None

    def _kill(self) -> int:
        worker, self.worker = self.worker, None
        assert worker is not None
        return self.supervisor.kill(worker)

    def _death(self, status: int) -> str:
        setting = f"{self.supervisor.service.section}.memory_mb"
        if status == OUT_OF_SHARED_MEMORY:
            return f"was killed: it used more shared memory than {setting} allows"
        if status == OUT_OF_MEMORY:
            return f"was killed: with its children, it used more memory than {setting} allows"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (" (is the machine out of memory?)" if -code == signal.SIGKILL else "")


class WorkerPool:
    """Workers that take tasks from one queue."""

    def __init__(self, service: Service, workers: int, limit_s: float) -> None:
        """`limit_s` is the time limit of a call."""
        self._name = service.name
        self._run = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[WorkerClient], Any]] | None] = queue.SimpleQueue()
        self.supervisor = Supervisor(service)  # before any threads start
        self._clients = [WorkerClient(self.supervisor, limit_s) for _ in range(workers)]
        self.threads = [
            threading.Thread(target=self._work, args=(client,), name=f"dapo-{self._name}-{index}", daemon=True)
            for index, client in enumerate(self._clients)
        ]
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # the system may have no more threads
            self.close()
            raise

    def submit(self, task: Callable[[WorkerClient], Result]) -> Future[Result]:
        """Runs a task, which calls a worker, in a thread. It can be cancelled until a thread has taken it."""
        future: Future[Result] = Future()
        if os.getpid() != self._run:
            raise RuntimeError(f"this process was forked from the owner of the {self._name} pool; create a pool here")
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._name} pool is closed")
            self._tasks.put((future, task))
        return future

    @property
    def pids(self) -> list[int]:
        """The fork server and the current workers."""
        workers = [client.worker for client in self._clients]
        return [self.supervisor.server_pid, *(worker.pid for worker in workers if worker is not None)]

    def close(self) -> None:
        """Ends all processes. Futures without a result are cancelled or raise RuntimeError."""
        if os.getpid() != self._run:
            return
        with self._lock:
            self._closed = True
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self.threads:
            self._tasks.put(None)
        self.supervisor.close()
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def _work(self, client: WorkerClient) -> None:
        while (entry := self._tasks.get()) is not None:
            future, task = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task(client))
                except BaseException as error:
                    was_closed = RuntimeError(f"the {self._name} pool was closed")
                    future.set_exception(was_closed if self._closed else error)
            del entry, future, task  # hold no references while waiting
        client.leave()
