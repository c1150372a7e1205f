"""Simulated engines on one virtual clock, behind the Engine protocol: the sampler of a run drives them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.lab.bench.sampling_simulation import World
from dapo_rl.lab.plan.replica import Replica, SimulatedRow
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import FinishReason, Trajectory


class Load(NamedTuple):
    """Samples from a time on."""

    time: float
    running: int
    waiting: int


@dataclass(slots=True)
class TimedEngine(Engine):
    """Requests go to the replica with the fewest samples. `now` is the virtual time, in seconds."""

    world: World
    replicas: list[Replica]
    quantum: float = 0.0
    """`poll` returns the samples that end within so many seconds of the first one. It makes simulations of many samples
    faster, and delays what depends on them."""
    now: float = 0.0
    version: int = 0
    loads: list[Load] = field(default_factory=list)
    """The load over time."""
    _due: list[tuple[float, int, float]] = field(default_factory=list)
    """New weights to load: when, their version, and the seconds that it takes."""
    _taken: dict[str, int] = field(default_factory=dict)
    """The replica of each request that left with the version it has; its pages are still there."""
    _events: list[float] = field(default_factory=list)
    """The next event of each replica; empty if they have to be computed anew."""

    def submit(self, request: Request) -> None:
        place = self._taken.pop(request.id, None)
        kept = place is not None
        if place is None:
            place = min(range(len(self.replicas)), key=lambda i: self.replicas[i].load)
        replica = self.replicas[place]
        replica.run_until(self.now)
        lengths = self.world.lengths(f"p{request.prompt_ids[0]}")
        prompt = replica.prompt_tokens / request.samples  # computed once for all samples of the group
        for begun in (*request.begun, *map(Trajectory.nothing, request.starting)):
            tokens = len(begun.token_ids)
            row = SimulatedRow(request, begun.index, lengths[begun.index], 0.0 if kept else prompt + tokens)
            for version, count in _spans(begun):
                row.add(version, count)
            replica.queue.append(row)
        replica.admit()
        if self._events:
            self._events[place] = replica.next_event()

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """The timeout is real time, of which simulated work takes none: it returns when a sample ends."""
        done: list[Completion] = []
        until = inf
        while True:
            self._events = self._events or [replica.next_event() for replica in self.replicas]
            first = min(self._events)
            if first == inf or first > until:
                break
            if self._due and self._due[0][0] <= first:
                self._load(*self._due.pop(0))
                continue
            place = self._events.index(first)
            ended = self.replicas[place].step_to_event()
            self._events[place] = self.replicas[place].next_event()
            self.now = max(self.now, first)
            done += [Completion(row.request.id, row.index, self._sample(row)) for row in ended]
            if done and until == inf:
                until = self.now + self.quantum
        self._note()
        return done

    def cancel(self, ids: Collection[str]) -> int:
        unwanted, lost = set(ids), 0
        self._events = []
        for replica in self.replicas:
            rows = replica.take()
            lost += sum(row.written for row in rows if row.request.id in unwanted)
            replica.queue.extend(row for row in rows if row.request.id not in unwanted)
            replica.admit()
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        self._load(self.now, version, 0.0)

    def receive_at(self, time: float, version: int, seconds: float) -> None:
        """Loads new weights later, while it samples."""
        self._due.append((time, version, seconds))

    def take_unfinished(self) -> list[Request]:
        requests: dict[str, Request] = {}
        written: dict[str, list[Trajectory]] = {}
        self._events = []
        for place, replica in enumerate(self.replicas):
            for row in replica.take():
                requests[row.request.id] = row.request
                written.setdefault(row.request.id, []).append(row.begun())
                self._taken[row.request.id] = place
        return [request.left(written[name]) for name, request in requests.items()]

    def rest_until(self, time: float) -> None:
        """Lets time pass without sampling."""
        self._note()
        self.now = max(self.now, time)
        while self._due and self._due[0][0] <= self.now:
            self._load(*self._due.pop(0))
        for replica in self.replicas:
            replica.clock = max(replica.clock, self.now)
        self._events = []
        self._note()

    @property
    def preempted(self) -> int:
        return sum(replica.preempted for replica in self.replicas)

    def _load(self, time: float, version: int, seconds: float) -> None:
        for replica in self.replicas:
            replica.run_until(time)
            replica.change_weights(version, seconds)
        self.version, self._events = version, []
        self._taken.clear()  # keys and values of old weights

    def _note(self) -> None:
        running = sum(len(replica.running) for replica in self.replicas)
        self.loads.append(Load(self.now, running, sum(len(replica.queue) for replica in self.replicas)))

    def _sample(self, row: SimulatedRow) -> Trajectory:
        passes = self.world.passes(f"p{row.request.prompt_ids[0]}")
        text = "right" if passes and row.index == 0 else "wrong"
        begun = row.begun()
        reason: FinishReason = "length" if row.length >= self.world.longest else "stop"
        return begun.replace(text=text, finish_reason=reason)


def _spans(begun: Trajectory) -> list[tuple[int, int]]:
    """The versions of a sample's tokens, and how many tokens in a row have each."""
    versions = begun.versions
    if not len(versions):
        return []
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    counts = np.diff(starts, append=len(versions))
    return [(int(versions[start]), int(count)) for start, count in zip(starts, counts, strict=True)]
