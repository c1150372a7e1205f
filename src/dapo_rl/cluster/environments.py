"""Environments on the nodes of a Ray cluster: an actor on each node runs a pool of its own (`env.workers_per_node`)."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dapo_rl.base.load import modules_of_files
from dapo_rl.base.quote import one_line
from dapo_rl.cluster.exit_reason import describe_loss
from dapo_rl.cluster.ray_session import import_ray, ray_logs, work_in
from dapo_rl.config import EnvSettings
from dapo_rl.envs.pool import EnvironmentPool, Environments
from dapo_rl.envs.protocol import AssistantTurn, EpisodeFailure
from dapo_rl.envs.replies import Result
from dapo_rl.envs.shared_loops import finished
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

AT_A_TIME = 4096
"""Calls that an actor has at a time; most of them wait."""
LOOK_S = 10.0
"""Seconds between looks for nodes that were added or came back, while an actor is missing."""
BEFORE_START = "creation task"
"""In Ray's message if the actor's constructor raised an exception, whose text then ends the message."""


class EnvironmentActor:
    """The environments of a node."""

    def __init__(self, factory: bytes, settings: EnvSettings, name: str, directory: str) -> None:
        work_in(directory)
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


@dataclass(slots=True)
class _NodeActor:
    """The actor of a node; None: it was lost, and is not started again yet."""

    node: str
    actor: Any
    lost: int = 0
    """How often."""


class DistributedEnvironments(Environments):
    """Environments on all nodes, with the methods of an `EnvironmentPool`. Episodes are dealt out to the nodes in turn.

    An actor that is lost ends its episodes as `lost`. It is started again before the next episode, on its node or on
    one that has none yet; without such a node, the other actors take over.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        settings: EnvSettings,
        name: str,
        restarts: int = 0,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`restarts`: how often each actor is started again. `note` is told of losses."""
        from ray import cloudpickle

        super().__init__(factory, name)
        own = settings.model_copy(update={"workers": settings.workers_per_node})
        self._ray, self._restarts, self._note = import_ray(), restarts, note
        self._made = self._ray.remote(num_cpus=0, max_concurrency=AT_A_TIME, max_restarts=0)(EnvironmentActor)
        for module in modules_of_files():  # the nodes need not have the files
            cloudpickle.register_pickle_by_value(module)
        self._arguments = (cloudpickle.dumps(factory), own, name, os.getcwd())
        self._nodes = [_NodeActor(node, self._start(node)) for node in self._live_nodes()]
        self._turn = itertools.count()
        self._losses: deque[tuple[Any, Exception]] = deque()
        """As threads of Ray learn of them."""
        self._why, self._more = "", ""
        """Of the last loss."""
        self._look_at = 0.0
        self._episodes: dict[str, Any] = {}

    def open(self, key: str, prompt: Prompt, seed: int, *context: int) -> Future[Result]:
        self._episodes[key] = self._next_actor()
        return self._call("open", key, prompt, seed, *context)

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
        actors = [each.actor for each in self._nodes if each.actor is not None]
        self._nodes = []
        for actor in actors:
            actor.close.remote()
        for actor in actors:
            self._ray.kill(actor)

    def _call(self, operation: str, key: str, *arguments: Any) -> Future[Result]:
        if (actor := self._episodes.get(key)) is None:
            return finished(EpisodeFailure("lost", "the episode was given up"))
        answer: Future[Result] = Future()
        asked: Future[Any] = actor.call.remote(operation, key, *arguments).future()

        def take(done: Future[Any]) -> None:
            try:
                result = done.result()
            except Exception as error:
                result = self._failure(actor, error)
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        asked.add_done_callback(take)
        return answer

    def _next_actor(self) -> Any:
        """The actor for the next episode."""
        self._count_losses()
        if any(each.actor is None for each in self._nodes) and time.monotonic() >= self._look_at:
            self._start_again()
        present = [each.actor for each in self._nodes if each.actor is not None]
        if not present:
            raise UserError(
                f"env.workers_per_node: no node has environments left (cluster.restarts={self._restarts}); the last "
                f"actor {self._why}; look for the cause in {ray_logs()}",
                more=self._more,
            )
        return present[next(self._turn) % len(present)]

    def _failure(self, actor: Any, error: Exception) -> EpisodeFailure | Exception:
        """The result of a call that raised; called by a thread of Ray. A lost or unreachable actor does not count
        against the environment."""
        known = self._ray.exceptions
        if isinstance(error, known.RayTaskError):
            raised: Exception = error
            return raised
        if not isinstance(error, known.ActorUnavailableError):
            self._losses.append((actor, error))
        return EpisodeFailure("lost", f"the actor of its node {self._describe(error)}")

    def _count_losses(self) -> None:
        while self._losses:
            actor, error = self._losses.popleft()
            for each in self._nodes:
                if each.actor is actor:
                    each.actor, self._look_at = None, 0.0
                    each.lost += 1
                    self._why = self._describe(error)
                    self._more = str(error) if BEFORE_START in str(error) else ""
                    again = "they start again" if each.lost <= self._restarts else "they do not start again"
                    self._note(f"the environments of node {each.node[:8]} were lost: the actor {self._why}; {again}")

    def _start_again(self) -> None:
        """Starts missing actors on their nodes, or on nodes that have none."""
        self._look_at = time.monotonic() + LOOK_S
        live = self._live_nodes()
        free = [node for node in live if all(each.node != node for each in self._nodes)]
        for each in self._nodes:
            if each.actor is not None or each.lost > self._restarts:
                continue
            if each.node not in live and free:
                each.node = free.pop()
            if each.node in live:
                each.actor = self._start(each.node)

    def _start(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        return self._made.options(scheduling_strategy=where).remote(*self._arguments)

    def _live_nodes(self) -> list[str]:
        return sorted(node["NodeID"] for node in self._ray.nodes() if node["Alive"])

    def _describe(self, error: Exception) -> str:
        text = str(error).strip()
        if BEFORE_START in text:
            return f"did not start: {one_line(text.splitlines()[-1])}"
        return describe_loss(self._ray, error)
