"""Runs environments in worker processes, concurrently with the run, with enforced limits on time and memory.

- Asynchronous environments share a process, in which many episodes are at work at a time.
- Others share processes (`env.workers`), each of which makes one call at a time; so do those of which only a part is
  asynchronous. Calls of a stateless environment, such as a set of tools, go to any of them. An episode with a state
  stays in its process, alone as long as there are enough.

Whatever an environment does, each of its calls ends in a result or an `EpisodeFailure`, and only its own episode ends.
If its process is killed, deterministic environments that shared it are brought back in a new one.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.event_loop import AtWork, EventLoop, calls_at_work
from dapo_rl.envs.host import Host
from dapo_rl.envs.protocol import AssistantTurn, ToolSchema
from dapo_rl.envs.replies import Result, encode_bounded, opening_of, seen_turn
from dapo_rl.envs.shared_loops import SharedLoops, finished
from dapo_rl.envs.shared_processes import SharedProcesses
from dapo_rl.types import Prompt
from dapo_rl.workers import Service, Supervisor

Answer = Callable[[bytearray, Callable[[], bool]], bytes]


class Environments(ABC):
    """The environments of a run, by the names of episodes. Calls return futures of results, or raise a UserError.
    `factory` makes the environment of an episode."""

    def __init__(self, factory: Callable[[], Any], name: str) -> None:
        self.name = name
        self.tools: Sequence[ToolSchema] = getattr(factory, "tools", ())
        """The tools of all episodes, where they are known before one begins."""
        self.deterministic = declares(factory, "deterministic")
        self.takes_tokens = declares(factory, "takes_tokens")
        """Whether turns are given with their tokens."""
        self.has_state = declares(factory, "has_state")
        """Whether the last observation of an episode has a state for reward functions."""
        self._keys = itertools.count()

    def new_key(self) -> str:
        """The name of a new episode."""
        return f"episode-{next(self._keys)}"

    @abstractmethod
    def open(self, key: str, prompt: Prompt, seed: int, *context: int) -> Future[Result]:
        """`context`, of prompt and response together: for environments that take tokens."""

    @abstractmethod
    def step(self, key: str, turn: AssistantTurn) -> Future[Result]: ...

    @abstractmethod
    def result(self, key: str) -> Future[Result]:
        """The last reward of an episode that a limit ends."""

    @abstractmethod
    def close_episodes(self, keys: Collection[str]) -> None:
        """Ends episodes, whether they have ended or not."""

    @abstractmethod
    def close(self) -> None:
        """Ends all processes."""


class EnvironmentPool(Environments):
    """The environments of a run in processes of this host."""

    def __init__(self, factory: Callable[[], Any], settings: EnvSettings, name: str = "environment") -> None:
        super().__init__(factory, name)
        self.settings = settings
        kind: Any = getattr(factory, "environment", factory)
        self.stateless = declares(factory, "stateless")
        has_coroutines = any(inspect.iscoroutinefunction(getattr(kind, method, None)) for method in ("open", "step"))
        self.is_async = has_coroutines or declares(factory, "is_async")
        self._opens = hasattr(kind, "open")
        at_work = calls_at_work(settings.workers or 1) if self.is_async else None
        answer = _answer(Host(factory, name, self.stateless), name, settings, at_work)
        service = Service(answer, settings.memory_mb, name="environment", section="env")
        self._supervisor = Supervisor(service)  # before any threads start
        self._calls: SharedLoops | SharedProcesses
        if at_work is not None:
            self._calls = SharedLoops(self._supervisor, settings, at_work)
        else:
            self._calls = SharedProcesses(self._supervisor, settings, self.stateless, self.deterministic)
        self._close = weakref.finalize(self, _close, self._calls, self._supervisor, os.getpid())

    def open(self, key: str, prompt: Prompt, seed: int, *context: int) -> Future[Result]:
        if not self._opens:
            self._calls.begin(key)
            if self.stateless:
                return finished(opening_of(prompt, None))
        return self._calls.call("open", key, (prompt, seed, *context))

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

    def __exit__(self, *_: object) -> None:
        self.close()


def declares(factory: Callable[[], Any], name: str) -> bool:
    """Whether the environments of a factory say that they are, for example, `deterministic`: the factory says it, or
    their class."""
    return bool(getattr(factory, name, False) or getattr(getattr(factory, "environment", factory), name, False))


def _answer(host: Host, name: str, settings: EnvSettings, at_work: AtWork | None) -> Answer:
    """How a worker answers. `at_work`: of asynchronous environments."""
    if at_work is not None:
        loop = EventLoop(host, settings.timeout_s, at_work)
        return lambda body, is_short: loop.exchange(is_short, *pickle.loads(body))
    runner = asyncio.Runner()

    def answer(body: bytearray, is_short: Callable[[], bool]) -> bytes:
        row = host.call(body, runner)
        row["exhausted"] = row["kind"] == "failure" and is_short()
        return encode_bounded(row, name)

    return answer


def _close(calls: SharedProcesses | SharedLoops, supervisor: Supervisor, run: int) -> None:
    if os.getpid() == run:
        calls.stop()
        supervisor.close()
