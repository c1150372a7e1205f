"""A pool of workers: a thread for each, which takes tasks from one queue."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dapo_rl.workers.client import WorkerClient
from dapo_rl.workers.supervisor import Supervisor
from dapo_rl.workers.worker import Service

Result = TypeVar("Result")


class WorkerPool:
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
