"""The cost of dynamic sampling: our sampler and sampling in rounds, as in other libraries, on a simulated engine.

Only the schedule is simulated. Response lengths are drawn from a long-tailed distribution, and groups pass the filter
at a given acceptance rate. Both depend on the prompt alone, so all strategies see the same lengths and outcomes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Completion, Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.models.weights import WeightSource
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.rollout.sampler import Prompts, Sampler
from dapo_rl.types import Group, Prompt, Trajectory, Verdict, Verifier

LONGEST = 4096


@dataclass(frozen=True, slots=True)
class World:
    """The response lengths of each prompt, and whether its group passes."""

    acceptance: float
    group: int
    seed: int = 0
    median: float = 250.0
    spread: float = 1.0
    """The standard deviation of the log length: at 1 the mean is 1.65 medians, and 1% of lengths exceed 10 medians."""
    longest: int = LONGEST

    def lengths(self, prompt: str) -> tuple[int, ...]:
        return _lengths(self, prompt)

    def passes(self, prompt: str) -> bool:
        return _chance(self.seed, prompt) < self.acceptance

    def least_tokens(self, groups: int) -> int:
        """The tokens of an oracle that stops drawing at the last group it needs."""
        tokens = found = number = 0
        while found < groups:
            name = f"p{number}"
            tokens += sum(self.lengths(name))
            found += self.passes(name)
            number += 1
        return tokens


@lru_cache(maxsize=2**14)
def _lengths(world: World, prompt: str) -> tuple[int, ...]:
    rng = random.Random(f"{world.seed}:length:{prompt}")
    draws = (rng.lognormvariate(math.log(world.median), world.spread) for _ in range(world.group))
    return tuple(min(max(1, round(length)), world.longest) for length in draws)


@lru_cache(maxsize=2**14)
def _chance(seed: int, prompt: str) -> float:
    return random.Random(f"{seed}:passes:{prompt}").random()


class EndlessPrompts:
    def __init__(self) -> None:
        self._front: list[Prompt] = []
        self._next = 0

    def draw(self) -> Prompt:
        if self._front:
            return self._front.pop(0)
        self._next += 1
        return self.find(f"p{self._next - 1}")

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        self._front = [*prompts, *self._front]

    def find(self, prompt_id: str) -> Prompt:
        return Prompt(prompt_id, prompt_id, np.array([int(prompt_id[1:])], np.int32))

    def rest(self, prompt: Prompt, epochs: int) -> None:
        raise NotImplementedError("no prompt comes twice")


@dataclass(slots=True)
class _Row:
    request: Request
    begun: Trajectory
    length: int
    left: int

    def written(self, version: int) -> Trajectory:
        """Its state so far; tokens generated since it got its slot have this version."""
        new = self.length - self.left - len(self.begun.token_ids)
        return self.begun.then(np.zeros(new, np.int32), np.zeros(new, np.float32), version)


@dataclass(slots=True)
class SimulatedEngine(Engine):
    """Continuous batching with `slots` slots: each step adds one token to every sample that has a slot."""

    world: World
    slots: int
    version: int = 0
    steps: int = 0
    tokens: int = 0
    _rows: list[_Row] = field(default_factory=list)
    _queue: deque[_Row] = field(default_factory=deque)

    def submit(self, request: Request) -> None:
        lengths = self.world.lengths(f"p{request.prompt_ids[0]}")
        for begun in (*request.begun, *map(Trajectory.nothing, request.starting)):
            length = lengths[begun.index]
            self._queue.append(_Row(request, begun, length, length - len(begun.token_ids)))

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        while self._queue and len(self._rows) < self.slots:
            self._rows.append(self._queue.popleft())
        if not self._rows:
            return []
        jump = min(row.left for row in self._rows)
        self.steps += jump
        self.tokens += jump * len(self._rows)
        for row in self._rows:
            row.left -= jump
        done = [row for row in self._rows if row.left == 0]
        self._rows = [row for row in self._rows if row.left]
        return [Completion(row.request.id, row.begun.index, self._sample(row)) for row in done]

    def cancel(self, ids: Collection[str]) -> int:
        lost = sum(row.length - row.left for row in (*self._rows, *self._queue) if row.request.id in ids)
        self._rows = [row for row in self._rows if row.request.id not in ids]
        self._queue = deque(row for row in self._queue if row.request.id not in ids)
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        unfinished = self.take_unfinished()
        self.version = version
        for request in unfinished:
            self.submit(request)

    def take_unfinished(self) -> list[Request]:
        rows = [*self._rows, *self._queue]
        self._rows, self._queue = [], deque()
        requests = {row.request.id: row.request for row in rows}
        written: dict[str, list[Trajectory]] = {name: [] for name in requests}
        for row in rows:
            written[row.request.id].append(row.written(self.version))
        return [request.left(written[name]) for name, request in requests.items()]

    def _sample(self, row: _Row) -> Trajectory:
        passes = self.world.passes(f"p{row.request.prompt_ids[0]}")
        text = "right" if passes and row.begun.index == 0 else "wrong"
        written = row.written(self.version)
        return written.replace(text=text, finish_reason="stop")


class NoWeights:
    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return iter(())


class SaysSo:
    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
        return [right if sample.text == "right" else wrong for sample in samples]


@dataclass(slots=True)
class Rounds:
    """Dynamic sampling in rounds, as in other libraries: each batch of prompts starts when the last one is done.

    `fill` samples rounds of `round_size × n` prompts until n groups pass, and drops the surplus.

    verl's recipe uses rounds of three batches and stops the run after `most` rounds. ms-swift uses rounds of one batch
    and, if `most` rounds are not enough, trains on the first round unfiltered (`gives_up`).
    """

    prompts: Prompts
    engine: Engine
    verifier: Verifier
    params: SamplingParams
    group_size: int
    round_size: int = 1
    most: int = 10**9
    gives_up: bool = False
    draws: int = 0

    def fill(self, n: int) -> SampledBatch:
        kept: list[Group] = []
        dropped: list[tuple[Group, Outcome]] = []
        sampled: list[Group] = []
        rounds = 0
        while len(kept) < n and rounds < self.most:
            rounds += 1
            for group in self._round(n * self.round_size):
                sampled.append(group)
                outcome = _outcome(group)
                if outcome != "kept":
                    dropped.append((group, outcome))
                elif len(kept) < n:
                    kept.append(group)
                else:
                    dropped.append((group, "surplus"))
        if len(kept) < n and self.gives_up:
            first = sampled[:n]
            dropped = [(group, "surplus" if _outcome(group) == "kept" else _outcome(group)) for group in sampled[n:]]
            kept = first
        tokens = sum(group.tokens for group in sampled)
        return SampledBatch(
            tuple(kept), tuple(dropped), tuple(sampled), version=self.engine.version, tokens_generated=tokens
        )

    def _round(self, size: int) -> list[Group]:
        drawn = {f"draw-{self.draws + i}": (self.draws + i, self.prompts.draw()) for i in range(size)}
        self.draws += size
        for name, (draw, prompt) in drawn.items():
            seed = derive_seed(0, prompt.id, draw)
            self.engine.submit(Request(name, prompt.token_ids, self.group_size, self.params, seed))
        samples: dict[str, dict[int, Trajectory]] = {name: {} for name in drawn}
        while completions := self.engine.poll():
            for completion in completions:
                samples[completion.request_id][completion.index] = completion.sample
        groups = []
        for name, (draw, prompt) in drawn.items():
            responses = tuple(samples[name][i] for i in range(self.group_size))
            groups.append(Group(draw, prompt, responses, tuple(self.verifier(prompt, responses))))
        return groups


def _outcome(group: Group) -> Outcome:
    correct = {verdict.correct for verdict in group.verdicts}
    if len(correct) > 1:
        return "kept"
    return "all_correct" if correct == {True} else "all_wrong"


class Strategy(Protocol):
    def fill(self, n: int) -> SampledBatch: ...


def strategies(engine: SimulatedEngine, group: int, n: int) -> dict[str, Callable[[], Strategy]]:
    """Functions that build each strategy by name; use a new engine for each."""
    params = SamplingParams(max_new_tokens=LONGEST)

    def streaming(surplus: str, ahead: float = 0.0) -> Strategy:
        how = {"surplus": surplus, "ahead": ahead, "max_new_tokens": LONGEST}
        settings = SamplingSettings.model_validate({"group_size": group, "prompts_per_step": n, **how})
        return Sampler(EndlessPrompts(), engine, SaysSo(), params, settings, cap=10**9, seed=0)

    def rounds(**how: Any) -> Strategy:
        return Rounds(EndlessPrompts(), engine, SaysSo(), params, group, **how)

    return {
        "carry": lambda: streaming("carry"),
        "carry, ahead 0.5": lambda: streaming("carry", 0.5),
        "carry, ahead 1": lambda: streaming("carry", 1.0),
        "requeue": lambda: streaming("requeue"),
        "drop": lambda: streaming("drop"),
        "rounds of 3, verl": lambda: rounds(round_size=3),
        "rounds of 1": lambda: rounds(),
        "rounds of 1, ms-swift": lambda: rounds(most=4, gives_up=True),
    }


def simulate(acceptance: float, name: str, *, prompts: int, group: int, slots: int, steps: int, seed: int) -> dict:  # type: ignore[type-arg]
    """Simulates one strategy at one acceptance rate, over the steps of a run."""
    world = World(acceptance, group, seed)
    engine = SimulatedEngine(world, slots)
    strategy = strategies(engine, group, prompts)[name]()
    trained = stale = 0
    for step in range(steps):
        fill = strategy.fill(prompts)
        useful = [g for g in fill.kept if world.passes(g.prompt.id)]
        trained += len(useful)
        stale += sum(step - g.first_version for g in useful)
        engine.receive(step + 1, NoWeights())
    return {
        "acceptance": acceptance,
        "strategy": name,
        "trained_groups": trained,
        "tokens_per_group": engine.tokens / trained if trained else math.nan,
        "engine_steps_per_group": engine.steps / trained if trained else math.nan,
        "to_oracle": engine.tokens / world.least_tokens(trained) if trained else math.nan,
        "staleness": stale / trained if trained else math.nan,
    }


def print_simulation(rows: Iterable[dict[str, Any]], console: Console | None = None) -> None:
    console = console or Console()
    console.print(Text("per trained group: generated tokens, engine steps, age in weight versions", style="bold"))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown.add_column("accepted", justify="right")
    shown.add_column("strategy", no_wrap=True)
    for head in ("tokens", "vs. oracle", "steps", "staleness"):
        shown.add_column(head, justify="right")
    before = None
    for row in rows:
        lead = f"{row['acceptance']:.0%}" if row["acceptance"] != before else ""
        before = row["acceptance"]
        shown.add_row(
            lead,
            Text(row["strategy"]),
            f"{row['tokens_per_group']:,.0f}",
            f"{row['to_oracle']:.2f}×",
            f"{row['engine_steps_per_group']:,.0f}",
            f"{row['staleness']:.2f}",
        )
    console.print(shown)
