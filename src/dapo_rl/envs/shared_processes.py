"""Environments in processes that episodes share, one call at a time each."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.protocol import EpisodeFailure
from dapo_rl.envs.replies import Operation, Result, decode_call_result
from dapo_rl.errors import UserError
from dapo_rl.workers import Supervisor, WorkerClient, WorkerFailedError, WorkerGoneError

TOOL_PROCESSES = 64
"""Processes for tools, at most: each makes one call at a time."""
MOST_THREADS = 4096


class _Process:
    """A process and the episodes that it has."""

    def __init__(self, client: WorkerClient) -> None:
        self.client, self.lock = client, threading.Lock()
        self.episodes: set[str] = set()


class SharedProcesses:
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
        body = pickle.dumps((operation, key, arguments), pickle.HIGHEST_PROTOCOL)
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
            result = EpisodeFailure("lost", "its process was ended by the call of another episode; raise env.workers")
        if self._deterministic and not self._stateless and not isinstance(result, EpisodeFailure):
            with self._lock:
                if key in self._episodes:
                    self._history.setdefault(key, []).append((body, result))
        return result

    def _send(self, process: _Process, body: bytes, is_new: bool) -> Result:
        client = process.client
        try:
            result, exhausted = client.call(body, decode_call_result, retry=is_new)
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
                self._send(process, pickle.dumps(("close", key, ())), is_new=False)
        with self._lock:
            process.episodes.discard(key)


def default_processes() -> int:
    """For environments that have a state: four for each core."""
    return min(max(4 * (os.cpu_count() or 1), 8), 64)
