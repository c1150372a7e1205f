"""Environments on the nodes of a Ray cluster: an actor on each node runs a pool of its own (`env.workers_per_node`)."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from dapo_rl.config import EnvSettings
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.envs.protocol import AssistantTurn, EpisodeFailure
from dapo_rl.envs.replies import Result
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

AT_A_TIME = 4096
"""Calls that an actor has at a time; most of them wait."""


class EnvironmentActor:
    """The environments of a node."""

    def __init__(self, factory: bytes, settings: EnvSettings, name: str) -> None:
        self._pool = EnvironmentPool(pickle.loads(factory), settings, name)

    async def call(self, operation: str, key: str, *arguments: Any) -> Result | UserError:
        try:
            return await asyncio.wrap_future(getattr(self._pool, operation)(key, *arguments))
        except UserError as error:
            return error

    async def close_episodes(self, keys: Collection[str]) -> None:
        self._pool.close_episodes(keys)

    def close(self) -> None:
        self._pool.close()


class DistributedEnvironments:
    """Environments on all nodes, with the methods of an `EnvironmentPool`. Episodes are dealt out to the nodes in
    turn."""

    def __init__(self, factory: Callable[[], Any], settings: EnvSettings, name: str) -> None:
        import ray
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = getattr(factory, "environment", factory)
        self.name = name
        self.tools = getattr(factory, "tools", ())
        self.deterministic = bool(getattr(kind, "deterministic", False))
        self.takes_tokens = bool(getattr(kind, "takes_tokens", False))
        self.has_state = bool(getattr(kind, "has_state", False))
        self._ray = ray
        own = settings.model_copy(update={"workers": settings.workers_per_node})
        made = ray.remote(num_cpus=0, max_concurrency=AT_A_TIME, max_restarts=0)(EnvironmentActor)
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        self._actors = [
            made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                cloudpickle.dumps(factory), own, name
            )
            for node in nodes
        ]
        self._next = itertools.cycle(self._actors)
        self._episodes: dict[str, Any] = {}
        self._keys = itertools.count()

    def new_key(self) -> str:
        return f"episode-{next(self._keys)}"

    def open(self, key: str, prompt: Prompt, seed: int) -> Future[Result]:
        self._episodes[key] = next(self._next)
        return self._call("open", key, prompt, seed)

    def step(self, key: str, turn: AssistantTurn) -> Future[Result]:
        return self._call("step", key, turn)

    def result(self, key: str) -> Future[Result]:
        return self._call("result", key)

    def close_episodes(self, keys: Collection[str]) -> None:
        for key in keys:
            if (actor := self._episodes.pop(key, None)) is not None:
                actor.close_episodes.remote([key])

    @property
    def open_episodes(self) -> int:
        return len(self._episodes)

    def close(self) -> None:
        """Ends the actors with their processes."""
        for actor in self._actors:
            actor.close.remote()
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def _call(self, operation: str, key: str, *arguments: Any) -> Future[Result]:
        """A node that is lost ends its episodes."""
        answer: Future[Result] = Future()
        asked: Future[Any] = self._episodes[key].call.remote(operation, key, *arguments).future()

        def take(done: Future[Any]) -> None:
            try:
                result = done.result()
            except Exception as error:
                result = EpisodeFailure("crashed", f"its node was lost: {type(error).__name__}")
            if isinstance(result, UserError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        asked.add_done_callback(take)
        return answer
