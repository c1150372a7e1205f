"""One simulated engine: continuous batching over pages, on a clock of its own.

Every running sample gets one token per step, so a sample's end is known when it starts. The clock jumps from one event
to the next: a sample ends, the pages are full, or new work arrives.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf, sqrt
from typing import Any

import numpy as np

from dapo_rl.engines.protocol import Request
from dapo_rl.lab.plan.rates import Rates
from dapo_rl.types import BoolArray, IntArray, Trajectory

ROOM = 0.95
"""The share of the pages that starting samples may fill; the rest is for those that run to grow."""


@dataclass(slots=True, eq=False)
class SimulatedRow:
    """A sample that runs or waits."""

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

    def begun(self) -> Trajectory:
        tokens = self.written
        versions = _constant("i4", self.spans[-1][0], tokens) if len(self.spans) == 1 else self._versions()
        ids, logps = _constant("i4", 0, tokens), _constant("f4", 0, tokens)
        return Trajectory(ids, logps, versions=versions, mask=_true(tokens), index=self.index)

    def _versions(self) -> IntArray:
        versions = np.array([version for version, _ in self.spans], np.int32)
        return np.repeat(versions, [tokens for _, tokens in self.spans])


def _constant(kind: str, value: int, tokens: int) -> Any:
    """An array of one value, without memory of its own."""
    return _many(kind, value, 1 << tokens.bit_length())[:tokens]


def _true(tokens: int) -> BoolArray:
    mask: BoolArray = _constant("?", True, tokens)
    return mask


@lru_cache(maxsize=256)
def _many(kind: str, value: int, tokens: int) -> Any:
    return np.full(tokens, value, kind)


@dataclass(slots=True, eq=False)
class Replica:
    rates: Rates
    pages: int
    """Tokens that the cache holds."""
    slots: int
    prompt_tokens: int
    clock: float = 0.0
    steps: int = 0
    context: int = 0
    """Tokens in the cache."""
    preempted: int = 0
    running: list[tuple[int, int, SimulatedRow]] = field(default_factory=list)
    """A heap of the steps at which samples end."""
    queue: deque[SimulatedRow] = field(default_factory=deque)
    version: int = 0
    _order: int = 0
    _fixed: dict[int, float] = field(default_factory=dict)
    """The seconds of a step by its number of samples."""

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
        return max(0, ceil((sqrt(linear * linear + 2 * growth * seconds) - linear) / growth - 1e-9))
