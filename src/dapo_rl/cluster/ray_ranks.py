"""Ranks as Ray actors, on this host or on many. The driver tells each what to call, and collects the results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from dapo_rl.cluster.answer import Answer, sendable
from dapo_rl.cluster.exit_reason import LESS_FOR_RANKS, describe_loss, for_want_of_memory, losses
from dapo_rl.cluster.network import open_tcp_store, tcp_store, use_interface
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.errors import NonFiniteError, RankLostError, UserError

GRACE_S = 5.0
"""Seconds that the other ranks have to finish after one has failed."""
LOOK_S = 1.0
"""Seconds between two looks at the progress of ranks."""
COLLECTIVE = timedelta(hours=24)
"""The driver notices ranks that hang, sooner than a collective would."""
GROUPS = {"watch": 1, "disk": 1}
"""Threads of an actor besides the one that computes: it answers while it works, and writes while it computes."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among the others."""

    rank: int
    world_size: int
    device: torch.device
    alive: Callable[[], None] = lambda: None
    """Called while the rank makes progress."""
    on_host: int = 0
    """Its number among the ranks of its host."""
    of_host: int = 1
    """The ranks of its host."""


MakePolicy = Callable[[Place], Any]
"""Builds a rank's object, whose methods are called by name. It is pickled, so it must be defined in a module."""


class RayRanks:
    """Ranks that are started with the object, and ended with it."""

    def __init__(
        self,
        make: MakePolicy,
        world_size: int,
        *,
        on_gpu: bool = False,
        gpus: float = 0.0,
        threads: int = 1,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        """`gpus` is the share of a GPU that Ray sets aside for a rank; `threads` is the number of threads of a rank on
        a CPU. `timeout_s` is how long the ranks may go without progress; to start they have `start_timeout_s`."""
        self._ray = import_ray()
        self.world_size, self._timeout_s = world_size, timeout_s
        self._gpus = gpus
        self._lock = threading.Lock()
        self._lost: RankLostError | None = None
        """The first loss. A call in another thread then fails because the ranks are ended."""
        self._actors: list[Any] = self._start()
        try:
            processes = self._first_words(start_timeout_s)
            self.pids = [pid for _, pid in processes]
            store = self._answer(self._actors[0].open_store.remote(), 0, "start")
            places = _places([host for host, _ in processes], on_gpu)
            self._run("join", [(make, place, threads, store) for place in places], start_timeout_s)
        except BaseException:
            self.close(kill=True)
            raise

    def call(self, method: str, *arguments: Any, patience: float = 1) -> list[Any]:
        """Calls a method on every rank; the results by rank. `patience` multiplies the time that they may go without
        progress.

        An error that all ranks agree on is raised, and they can be called again. After any other error all are ended.
        """
        values = [(method, *arguments)] * self.world_size
        return self._run("call", values, self._timeout_s * patience, name=method)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`call` with different arguments for each rank."""
        return self._run("call", [(method, *own) for own in arguments], self._timeout_s, name=method)

    def call_aside(self, method: str, *arguments: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
        """`call` in a thread of its own, here and on the ranks, while `call` is used. It may take any time, as long as
        the ranks' processes answer. `check` is called meanwhile; it raises to abandon the call."""
        values = [(method, *arguments)] * self.world_size
        return self._run("call", values, self._timeout_s, name=method, aside=True, check=check)

    def store(self, method: str, *arguments: Any) -> Any:
        """`call`, with the result of the first rank in Ray's object store, where it belongs to this process; the
        reference to it."""
        kept: list[Any] = []
        self._run("call_and_store", [(method, *arguments)] * self.world_size, self._timeout_s, name=method, kept=kept)
        return kept[0]

    def close(self, *, kill: bool = False) -> None:
        """Ends all ranks; `kill` does not let them leave the process group first."""
        with self._lock:
            actors, self._actors = self._actors, []
        if actors:
            self._end(actors, kill)

    def _start(self) -> list[Any]:
        make = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0, concurrency_groups=GROUPS)
        actor = make(RankActor)
        return [actor.remote() for _ in range(self.world_size)]

    def _end(self, actors: Sequence[Any], kill: bool) -> None:
        if not kill:
            self._ray.wait([actor.leave.remote() for actor in actors], num_returns=len(actors), timeout=GRACE_S)
        for actor in actors:
            self._ray.kill(actor)

    def _first_words(self, timeout_s: float) -> list[tuple[str, int]]:
        """The host and the process of each rank, when they have all started."""
        words = [actor.where.remote() for actor in self._actors]
        _, waiting = self._ray.wait(words, num_returns=len(words), timeout=timeout_s)
        if waiting:
            raise RankLostError(f"{len(waiting)} of {len(words)} ranks did not start within {timeout_s:g} s")
        return [self._answer(word, rank, "start") for rank, word in enumerate(words)]

    def _run(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        timeout_s: float,
        *,
        name: str = "start",
        aside: bool = False,
        check: Callable[[], None] = lambda: None,
        kept: list[Any] | None = None,
    ) -> list[Any]:
        """The answers of the ranks. A method that returns a second value adds the references to it to `kept`."""
        actors = self._actors
        if not actors:
            raise self._lost or RankLostError("the ranks have been ended")
        how: dict[str, Any] = {"concurrency_group": "disk"} if aside else {}
        try:
            calls = []
            for actor, own in zip(actors, arguments, strict=True):
                returned = getattr(actor, method).options(num_returns=1 if kept is None else 2, **how).remote(*own)
                calls.append(returned if kept is None else returned[0])
                if kept is not None:
                    kept.append(returned[1])
            answers = self._answers(actors, calls, name, timeout_s, aside, check)
        except BaseException as error:  # what the ranks are doing is not known
            with self._lock:
                if isinstance(error, RankLostError) and self._lost is None:
                    self._lost = error
            self.close(kill=True)
            if isinstance(error, RankLostError):
                raise self._lost or error from None
            raise
        errors = [(rank, answer.error) for rank, answer in enumerate(answers) if answer is not None and answer.error]
        if not errors:
            return [answer.value for answer in answers if answer is not None]
        rank, first = errors[0]
        agreed = len(errors) == self.world_size and isinstance(first, UserError | NonFiniteError)
        if not agreed:
            self.close(kill=True)
        raise RuntimeError(f"rank {rank}:\n{first}") if type(first) is RuntimeError else first

    def _answers(
        self,
        actors: Sequence[Any],
        calls: Sequence[Any],
        method: str,
        timeout_s: float,
        aside: bool,
        check: Callable[[], None],
    ) -> list[Answer | None]:
        """What each rank answered; None for those that did not answer because another failed."""
        answers: list[Answer | None] = [None] * len(calls)
        look_s = min(LOOK_S, timeout_s / 8)
        watch = _Watch(self._ray, actors, any_answer=aside, most_s=2 * look_s)
        failed_at: float | None = None
        while waiting := [rank for rank, answer in enumerate(answers) if answer is None]:
            check()
            done, _ = self._ray.wait([calls[rank] for rank in waiting], timeout=look_s)
            for rank in (rank for rank in waiting if calls[rank] in done):
                answer = answers[rank] = self._answer(calls[rank], rank, method)
                watch.heard()
                if answer.error is not None and failed_at is None:
                    failed_at = time.monotonic()
            if failed_at is not None:
                if time.monotonic() > failed_at + GRACE_S:
                    break
            elif not done:
                watch.look(waiting)
                if (silent := watch.silent_s) > timeout_s:
                    slowest = ", ".join(map(str, watch.slowest(waiting)))
                    raise RankLostError(f"no progress for {silent:.0f} s in {method}, on rank {slowest}")
        return answers

    def _answer(self, call: Any, rank: int, method: str) -> Any:
        try:
            return self._ray.get(call)
        except losses(self._ray) as error:
            advice = LESS_FOR_RANKS if for_want_of_memory(self._ray, error) else ""
            raise RankLostError(f"rank {rank} {describe_loss(self._ray, error)}, in {method}", advice) from None


class _Watch:
    def __init__(self, ray: Any, actors: Sequence[Any], any_answer: bool, most_s: float) -> None:
        """With `any_answer`, a rank that answers makes progress. While this process is stopped (Ctrl-Z) or gets no CPU,
        it can hear of no progress: of the time between two looks, no more than `most_s` counts."""
        self._ray, self._actors, self._any_answer, self._most_s = ray, actors, any_answer, most_s
        self._time, self._seen = 0.0, time.monotonic()
        self._steps = [0] * len(actors)
        self._asked: dict[int, Any] = {}
        self._heard = self._now()
        self._answered = [self._heard] * len(actors)

    def _now(self) -> float:
        seen = time.monotonic()
        self._time += min(seen - self._seen, self._most_s)
        self._seen = seen
        return self._time

    @property
    def silent_s(self) -> float:
        """Seconds since any rank has made progress; with `any_answer`, since the rank that is silent for the longest
        time has answered."""
        return self._now() - (min(self._answered) if self._any_answer else self._heard)

    def heard(self) -> None:
        self._heard = self._now()

    def look(self, waiting: Sequence[int]) -> None:
        for rank in range(len(self._actors)):
            if rank not in waiting:
                self._answered[rank] = self._now()
            elif rank not in self._asked:
                self._asked[rank] = self._actors[rank].steps.options(concurrency_group="watch").remote()
        come, _ = self._ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        for rank in [rank for rank, asked in self._asked.items() if asked in come]:
            try:
                steps = self._ray.get(self._asked.pop(rank))
            except losses(self._ray):  # its call reports this
                continue
            self._answered[rank] = self._now()
            if steps != self._steps[rank]:
                self._steps[rank] = steps
                self.heard()

    def slowest(self, waiting: Sequence[int]) -> list[int]:
        """The ranks that have come least far, or do not answer."""
        if mute := [rank for rank in waiting if self._now() - self._answered[rank] > 2 * LOOK_S]:
            return mute
        fewest = min(self._steps[rank] for rank in waiting)
        return [rank for rank in waiting if self._steps[rank] == fewest]


class RankActor:
    """A process of Ray that becomes a rank."""

    def __init__(self) -> None:
        self._steps = 0
        self._policy: Any = None
        self._store: Any = None

    def where(self) -> tuple[str, int]:
        return import_ray().get_runtime_context().get_node_id(), os.getpid()

    def open_store(self) -> tuple[str, int]:
        self._store, address = open_tcp_store()
        return address

    def join(self, make: MakePolicy, place: Place, threads: int, store: tuple[str, int]) -> Answer:
        """Joins the process group, and builds the policy. Ranks find each other by the store, on the host of the
        first; a rank on a CPU computes with so many threads."""
        return self._answer(lambda: self._join(make, place, threads, store))

    def call(self, method: str, *arguments: Any) -> Answer:
        """Calls a method of the policy, or with `critic.` before its name, of the critic."""
        return self._answer(lambda: attrgetter(method)(self._policy)(*arguments))

    def call_and_store(self, method: str, *arguments: Any) -> tuple[Answer, Any]:
        answer = self.call(method, *arguments)
        return Answer(error=answer.error), answer.value

    def steps(self) -> int:
        return self._steps

    def leave(self) -> None:
        self._policy = self._store = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self, make: MakePolicy, place: Place, threads: int, store: tuple[str, int]) -> None:
        on_gpu = place.device.type == "cuda"
        use_interface()
        if on_gpu:
            torch.cuda.set_device(place.device)
        else:
            torch.set_num_threads(threads)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=self._store or tcp_store(*store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE,
        )
        self._policy = make(replace(place, alive=self._alive))

    def _alive(self) -> None:
        self._steps += 1

    def _answer(self, work: Callable[[], Any]) -> Answer:
        try:
            self._alive()
            return Answer(work())
        except Exception as error:
            return Answer(error=sendable(error, NonFiniteError))


def _places(hosts: Sequence[str], on_gpu: bool) -> list[Place]:
    """The places of ranks on these hosts. Ray shows each the GPU that is set aside for it as the first."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return [
        Place(rank, len(hosts), device, on_host=hosts[:rank].count(host), of_host=hosts.count(host))
        for rank, host in enumerate(hosts)
    ]
