"""Simulated engines on a virtual clock, behind the Engine protocol: the sampler of a run drives them.

Every running sample gets one token per step, so a sample's end is known when it starts. The clock jumps from one event
to the next: a sample ends, the pages are full, or new work arrives.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil, inf, sqrt
from typing import Any, NamedTuple

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.lab.plan.rates import Rates
from dapo_rl.lab.simulated_world import World
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import FinishReason, Trajectory

ROOM = 0.95
"""The share of the pages that starting samples may fill; the rest is for those that run to grow."""


class OneSecondSteps:
    """Every step of decoding takes one second, and everything else no time: the clock counts steps."""

    decode_token = 0.0

    def prefill(self, tokens: float) -> float:
        return 0.0

    def decode_fixed(self, rows: int) -> float:
        return 1.0


@dataclass(slots=True, eq=False)
class SimulatedRow:
    request: Request
    index: int
    length: int
    prefill: float
    """Tokens whose keys and values have to be computed before it runs."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the weights, and the tokens generated with each."""
    joined: int = 0
    """The engine's step up to which `spans` has its tokens, while it runs."""

    @property
    def written(self) -> int:
        return sum(tokens for _, tokens in self.spans)

    def add(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            tokens += self.spans.pop()[1]
        self.spans.append((version, tokens))

    def partial(self) -> Trajectory:
        """Its tokens so far. Only their number and versions matter, so the arrays take no memory."""
        tokens = self.written

        def constant(kind: str, value: int) -> Any:
            return np.broadcast_to(np.array(value, kind), tokens)

        versions = constant("i4", self.spans[0][0] if self.spans else 0)
        if len(self.spans) > 1:
            versions = np.repeat(*np.array(self.spans, np.int32).T)
        columns = {"token_ids": constant("i4", 0), "logps": constant("f4", 0), "versions": versions}
        return Trajectory.nothing(self.index).replace(columns=columns | {"mask": constant("?", True)})


@dataclass(slots=True, eq=False)
class Replica:
    """One engine with continuous batching over pages and a simulated clock."""

    rates: Rates | OneSecondSteps
    pages: int
    """Tokens that the cache holds."""
    slots: int
    prompt_tokens: int
    clock: float = 0.0
    steps: int = 0
    tokens: int = 0
    context: int = 0
    preempted: int = 0
    running: list[tuple[int, int, SimulatedRow]] = field(default_factory=list)
    """A heap of the steps at which samples end."""
    queue: deque[SimulatedRow] = field(default_factory=deque)
    version: int = 0
    _order: int = 0
    _fixed: dict[int, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.queue)

    def next_event(self) -> float:
        """When the next sample ends or the pages are full; inf without work."""
        return self.clock + self._seconds(self._jump()) if self.running else inf

    def step_to_event(self) -> list[SimulatedRow]:
        """Advances to the next event; returns the samples that end with it."""
        self._advance(self._jump())
        ended = []
        while self.running and self.running[0][0] == self.steps:
            row = heapq.heappop(self.running)[2]
            self._write(row)
            self.context -= self.prompt_tokens + row.length
            ended.append(row)
        if not ended:
            self._preempt()
        self.admit()
        return ended

    def run_until(self, time: float) -> None:
        """Advances to the first step that ends at this time or later, which no event precedes."""
        if not self.running:
            self.clock = max(self.clock, time)
        elif self.clock < time:
            self._advance(min(self._steps_in(time - self.clock), self._jump() - 1))

    def admit(self) -> None:
        """Starts waiting samples as long as there are slots and pages."""
        prefill = 0.0
        while self.queue and len(self.running) < self.slots:
            row = self.queue[0]
            context = self.prompt_tokens + row.written
            if self.running and self.context + context > ROOM * self.pages:
                break
            self.queue.popleft()
            prefill += row.prefill
            row.prefill, row.joined = 0.0, self.steps
            self.context += context
            self._order += 1
            heapq.heappush(self.running, (self.steps + row.length - row.written, self._order, row))
        self.clock += self.rates.prefill(prefill)

    def change_weights(self, version: int, seconds: float) -> None:
        """Stops for so long, and computes the keys and values of running samples with the new weights."""
        for _, _, row in self.running:
            self._write(row)
        self.version = version
        self.clock += seconds
        self.clock += self.rates.prefill(self.context)

    def take(self) -> list[SimulatedRow]:
        """Removes all samples: those that run, in the order in which they started, and those that wait."""
        rows = [row for _, _, row in sorted(self.running, key=lambda entry: entry[1])]
        for row in rows:
            self._write(row)
        rows += self.queue
        self.running, self.queue, self.context = [], deque(), 0
        return rows

    def _write(self, row: SimulatedRow) -> None:
        """Adds to a running sample the tokens that it got since it joined."""
        if new := self.steps - row.joined:
            row.add(self.version, new)
            row.joined = self.steps

    def _preempt(self) -> None:
        """Puts back the samples that started last, until there is room to grow."""
        last_first = sorted(self.running, key=lambda entry: -entry[1])
        while len(last_first) > 1 and self.context > ROOM * self.pages:
            _, _, row = last_first.pop(0)
            self._write(row)
            row.prefill = self.prompt_tokens + row.written
            self.context -= self.prompt_tokens + row.written
            self.queue.appendleft(row)
            self.preempted += 1
        self.running = last_first
        heapq.heapify(self.running)

    def _jump(self) -> int:
        """Steps until the next event. A single sample may always go on."""
        rows = len(self.running)
        until_end = self.running[0][0] - self.steps
        until_full = (self.pages - self.context) // rows if rows > 1 else until_end
        return max(1, min(until_end, until_full))

    def _advance(self, steps: int) -> None:
        if steps > 0:
            self.clock += self._seconds(steps)
            self.steps += steps
            self.tokens += steps * len(self.running)
            self.context += steps * len(self.running)

    def _seconds(self, steps: int) -> float:
        """Of so many steps, during which the contexts grow."""
        first, growth = self._step_seconds()
        return steps * first + growth * steps * (steps - 1) / 2

    def _step_seconds(self) -> tuple[float, float]:
        """Of the next step, and how much longer each later one takes."""
        rows = len(self.running)
        fixed = self._fixed.get(rows)
        if fixed is None:
            fixed = self._fixed[rows] = self.rates.decode_fixed(rows)
        token = self.rates.decode_token
        return fixed + self.context * token, rows * token

    def _steps_in(self, seconds: float) -> int:
        """The fewest steps that take at least this long."""
        first, growth = self._step_seconds()
        linear = first - growth / 2
        steps = (sqrt(linear * linear + 2 * growth * seconds) - linear) / growth if growth else seconds / first
        return max(0, ceil(steps - 1e-9))


class Load(NamedTuple):
    time: float
    running: int
    waiting: int


@dataclass(slots=True)
class SimulatedEngine(Engine):
    """Requests go to the replica with the fewest samples. `now` is the virtual time, in seconds."""

    world: World
    replicas: list[Replica]
    quantum: float = 0.0
    """`poll` returns the samples that end within so many seconds of the first one. It makes simulations of many samples
    faster, and delays what depends on them."""
    now: float = 0.0
    version: int = 0
    loads: list[Load] = field(default_factory=list)
    _due: list[tuple[float, int, float]] = field(default_factory=list)
    """New weights to load: when, their version, and the seconds that it takes."""
    _taken: dict[str, int] = field(default_factory=dict)
    """The replica of each request that left with the version it has; its pages are still there."""
    _events: list[float] = field(default_factory=list)
    """The next event of each replica; empty if they have to be computed anew."""

    @classmethod
    def counting_steps(cls, world: World, slots: int) -> SimulatedEngine:
        """One engine with `slots` slots and unlimited pages, whose clock counts its steps."""
        return cls(world, [Replica(OneSecondSteps(), sys.maxsize, slots, 0)])

    def submit(self, request: Request) -> None:
        place = self._taken.pop(request.id, None)
        kept = place is not None
        if place is None:
            place = min(range(len(self.replicas)), key=lambda i: self.replicas[i].load)
        replica = self.replicas[place]
        replica.run_until(self.now)
        lengths = self.world.lengths(f"p{request.prompt_ids[0]}")
        prompt = replica.prompt_tokens / request.samples  # computed once for all samples of the group
        for partial in request.trajectories:
            tokens = len(partial.token_ids)
            row = SimulatedRow(request, partial.index, lengths[partial.index], 0.0 if kept else prompt + tokens)
            for version, count in _spans(partial):
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
        self._due.append((time, version, seconds))

    def take_unfinished(self) -> list[Request]:
        requests: dict[str, Request] = {}
        written: dict[str, list[Trajectory]] = {}
        self._events = []
        for place, replica in enumerate(self.replicas):
            for row in replica.take():
                requests[row.request.id] = row.request
                written.setdefault(row.request.id, []).append(row.partial())
                self._taken[row.request.id] = place
        return [request.left(written[name]) for name, request in requests.items()]

    def rest_until(self, time: float) -> None:
        self._note()
        self.now = max(self.now, time)
        while self._due and self._due[0][0] <= self.now:
            self._load(*self._due.pop(0))
        for replica in self.replicas:
            replica.clock = max(replica.clock, self.now)
        self._events = []
        self._note()

    @property
    def steps(self) -> int:
        return sum(replica.steps for replica in self.replicas)

    @property
    def tokens(self) -> int:
        return sum(replica.tokens for replica in self.replicas)

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
        reason: FinishReason = "length" if row.length >= self.world.longest else "stop"
        return row.partial().replace(text=text, finish_reason=reason)


def _spans(partial: Trajectory) -> list[tuple[int, int]]:
    """The versions of a sample's tokens, and how many tokens in a row have each."""
    versions, counts = np.unique(partial.versions, return_counts=True)  # versions never decrease
    return list(zip(versions.tolist(), counts.tolist(), strict=True))
