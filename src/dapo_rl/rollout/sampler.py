"""Dynamic sampling: keeps groups in flight until a step's batch is full, and knows what became of each one.

Groups are admitted in the order in which their prompts were drawn. Whoever takes the groups that finish first prefers
short answers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from dapo_rl.algo import dynamic_sampling_filter
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import CapReachedError, NonFiniteError, UserError
from dapo_rl.rollout.draw import derive_seed
from dapo_rl.rollout.engine import Engine, Request, SamplingParams
from dapo_rl.types import Fate, Group, Prompt, Sample, Verdict, Verifier

GroupFilter = Callable[[Group], bool]


class Prompts(Protocol):
    """Where prompts come from."""

    def draw(self) -> Prompt: ...

    def push_front(self, prompts: list[Prompt]) -> None: ...

    def find(self, prompt_id: str) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Fill:
    """The outcome of filling one batch."""

    kept: tuple[Group, ...]
    """In the order drawn."""
    dropped: tuple[tuple[Group, Fate], ...]
    sampled: tuple[Group, ...]
    """All groups that were sampled in this step, whatever became of them; `kept` may hold older ones beside them."""
    filled_up: int
    """Groups without a signal that `on_cap: fill` put into the batch."""
    carried_over: int
    """Groups that wait for the next step."""
    tokens_generated: int
    tokens_cancelled: int
    """Of groups that were still being sampled when the batch was full."""
    generate_seconds: float
    verify_seconds: float
    note: str | None = None
    """What the cap policy did, for the user."""

    def fates(self) -> Counter[Fate]:
        return Counter(fate for _, fate in self.dropped) + Counter({"kept": len(self.kept)})


@dataclass(slots=True)
class _Flight:
    """A group on its way: its samples arrive one by one."""

    draw: int
    prompt: Prompt
    samples: list[Sample | None]


@dataclass(slots=True)
class _Step:
    """What has happened so far while a batch is being filled."""

    kept: list[Group] = field(default_factory=list)
    dropped: list[tuple[Group, Fate]] = field(default_factory=list)
    judged: dict[int, tuple[Group, Fate]] = field(default_factory=dict)
    """Groups with a verdict that wait for an earlier draw to get one."""
    sampled: list[Group] = field(default_factory=list)
    drawn: int = 0
    tokens: int = 0
    cancelled: int = 0
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0


class Sampler:
    def __init__(
        self,
        prompts: Prompts,
        engine: Engine,
        verifier: Verifier,
        params: SamplingParams,
        settings: SamplingSettings,
        *,
        cap: int,
        seed: int,
        max_error_share: float = 1.0,
        keep: GroupFilter | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._prompts, self._engine, self._verifier = prompts, engine, verifier
        self._params, self._settings, self._cap, self._seed = params, settings, cap, seed
        self._max_error_share, self._keep, self._on_progress = max_error_share, keep, on_progress
        self._next_draw = 0
        self._flights: dict[str, _Flight] = {}
        self._carried: list[Group] = []
        self._acceptance = _Acceptance()

    def fill(self, n: int) -> Fill:
        """Samples until `n` groups are kept, or the cap is reached."""
        step = _Step()
        self._admit_carried(step, n)
        cap = n if self._settings.dynamic_batch else self._cap
        while len(step.kept) < n:
            self._top_up(step, n, cap)
            if not self._flights:
                break
            self._advance(step)
            self._admit(step, n)
            self._check_verifier(step)
            self._on_progress(len(step.kept), n)
        filled_up, note = self._at_cap(step, n) if len(step.kept) < n else (0, None)
        self._put_back(step, self._engine.waiting)
        if self._settings.surplus == "carry":
            # What has begun ran beside the batch: the next step starts with it.
            while self._flights:
                self._advance(step)
        self._put_back(step, frozenset(self._flights))
        self._settle_surplus(step)
        return Fill(
            kept=tuple(step.kept),
            dropped=tuple(step.dropped),
            sampled=tuple(step.sampled),
            filled_up=filled_up,
            carried_over=len(self._carried),
            tokens_generated=step.tokens + step.cancelled,
            tokens_cancelled=step.cancelled,
            generate_seconds=step.generate_seconds,
            verify_seconds=step.verify_seconds,
            note=note,
        )

    @property
    def carried_tokens(self) -> int:
        """Tokens of the groups that wait for the next step."""
        return sum(group.tokens for group in self._carried)

    def state(self) -> dict[str, Any]:
        """Everything that the next `fill` depends on, JSON-able."""
        return {
            "next_draw": self._next_draw,
            "acceptance": asdict(self._acceptance),
            "carried": [
                {
                    "draw": group.draw,
                    "prompt": group.prompt.id,
                    "samples": [asdict(sample) for sample in group.samples],
                    "verdicts": [asdict(verdict) for verdict in group.verdicts],
                }
                for group in self._carried
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next_draw = state["next_draw"]
        self._acceptance = _Acceptance(**state["acceptance"])
        self._carried = [
            Group(
                draw=entry["draw"],
                prompt=self._prompts.find(entry["prompt"]),
                samples=tuple(_sample_from(sample) for sample in entry["samples"]),
                verdicts=tuple(Verdict(**verdict) for verdict in entry["verdicts"]),
            )
            for entry in state["carried"]
        ]

    def _admit_carried(self, step: _Step, n: int) -> None:
        waiting, self._carried = self._carried, []
        for group in waiting:
            oldest = min(sample.versions[0] for sample in group.samples)
            if self._engine.version - oldest > self._settings.max_staleness:
                step.dropped.append((group, "stale"))
            elif len(step.kept) < n:
                step.kept.append(group)
            else:
                self._carried.append(group)

    def _top_up(self, step: _Step, n: int, cap: int) -> None:
        """Starts as many groups as are likely to be needed, at the acceptance rate seen so far."""
        good_in_waiting = sum(fate == "kept" for _, fate in step.judged.values())
        missing = n - len(step.kept) - good_in_waiting
        if self._settings.dynamic_batch:
            wanted = cap
        elif self._settings.dynamic:
            wanted = math.ceil(missing / self._acceptance.rate) - len(self._flights)
        else:
            wanted = missing - len(self._flights)
        for _ in range(min(wanted, cap - step.drawn)):
            self._start(step)

    def _start(self, step: _Step) -> None:
        prompt, draw = self._prompts.draw(), self._next_draw
        request = Request(
            id=f"draw-{draw}",
            prompt_ids=prompt.token_ids,
            count=self._settings.group_size,
            params=self._params,
            seed=derive_seed(self._seed, prompt.id, draw),
        )
        self._engine.submit(request)
        self._flights[request.id] = _Flight(draw, prompt, [None] * request.count)
        self._next_draw += 1
        step.drawn += 1

    def _advance(self, step: _Step) -> None:
        """Lets the engine go on, and judges the groups that are whole."""
        started = time.perf_counter()
        completions = self._engine.poll()
        step.generate_seconds += time.perf_counter() - started
        whole: list[_Flight] = []
        for completion in completions:
            flight = self._flights[completion.request_id]
            flight.samples[completion.index] = completion.sample
            step.tokens += len(completion.sample.token_ids)
            if not all(map(math.isfinite, completion.sample.logps)):
                raise NonFiniteError("the engine sampled a token whose log-probability is not a number")
            if None not in flight.samples:
                whole.append(self._flights.pop(completion.request_id))
        started = time.perf_counter()
        for flight in whole:
            samples = tuple(sample for sample in flight.samples if sample is not None)
            verdicts = tuple(self._verifier(flight.prompt, samples))
            group = Group(flight.draw, flight.prompt, samples, verdicts)
            fate = self._judge(group)
            self._acceptance.observe(fate == "kept")
            step.judged[flight.draw] = (group, fate)
            step.sampled.append(group)
        step.verify_seconds += time.perf_counter() - started

    def _judge(self, group: Group) -> Fate:
        """Decides by correctness or raw scores, before any length penalty is in them."""
        if any(verdict.failed for verdict in group.verdicts):
            return "verifier_error"
        if self._settings.dynamic:
            correct = [verdict.correct for verdict in group.verdicts]
            if self._settings.metric == "score":
                scores = torch.tensor([[verdict.score for verdict in group.verdicts]])
                if not dynamic_sampling_filter(scores).item():
                    return "no_spread"
            elif not dynamic_sampling_filter(torch.tensor([correct])).item():
                return "all_correct" if correct[0] else "all_wrong"
        return "kept" if self._passes_users_filter(group) else "filtered"

    def _passes_users_filter(self, group: Group) -> bool:
        if self._keep is None:
            return True
        try:
            return bool(self._keep(group))
        except Exception as error:
            raise UserError(
                f"sampling.filter: {type(error).__name__}: {error}, on the group of prompt {group.prompt.id}; "
                "it is called with a group (prompt, samples, verdicts) and returns whether to keep it"
            ) from error

    def _admit(self, step: _Step, n: int) -> None:
        """Takes judged groups in the order drawn; the first one that is still out holds up those after it."""
        still_out = {flight.draw for flight in self._flights.values()}
        for draw in sorted(step.judged):
            if len(step.kept) == n or any(out < draw for out in still_out):
                break
            group, fate = step.judged.pop(draw)
            if fate == "kept":
                step.kept.append(group)
            else:
                step.dropped.append((group, fate))

    def _at_cap(self, step: _Step, n: int) -> tuple[int, str | None]:
        """The batch is not full and no more may be drawn: a policy decides, and says what it did."""
        if self._settings.dynamic_batch:
            if not step.kept:
                raise CapReachedError(f"sampling.dynamic_batch: none of {step.drawn} groups passed ({_reasons(step)})")
            return 0, None
        found = f"{step.drawn} groups drawn, {len(step.kept)} of {n} kept ({_reasons(step)})"
        if self._settings.on_cap == "fill":
            spare = [entry for entry in step.dropped if entry[1] in ("all_correct", "all_wrong", "no_spread")]
            chosen = spare[: n - len(step.kept)]
            step.dropped = [entry for entry in step.dropped if entry not in chosen]
            step.kept = sorted([*step.kept, *(group for group, _ in chosen)], key=lambda group: group.draw)
            if step.kept:
                return len(chosen), f"sampling.cap reached: {found}; filled up with {len(chosen)} uninformative groups"
        if self._settings.on_cap == "partial" and step.kept:
            return 0, f"sampling.cap reached: {found}; training on {len(step.kept)} groups"
        raise CapReachedError(
            f"sampling.cap: {found}; raise sampling.cap, use easier or harder prompts, "
            "or choose sampling.on_cap=partial or fill"
        )

    def _put_back(self, step: _Step, requests: frozenset[str]) -> None:
        """Prompts whose groups are not wanted any more before they are whole go back to the front of the stream."""
        unused = sorted((self._flights.pop(name) for name in requests), key=lambda flight: flight.draw)
        for flight in unused:
            step.cancelled += self._engine.cancel(f"draw-{flight.draw}")
        step.drawn -= len(unused)
        self._prompts.push_front([flight.prompt for flight in unused])

    def _settle_surplus(self, step: _Step) -> None:
        for draw in sorted(step.judged):
            group, fate = step.judged[draw]
            if fate != "kept":
                step.dropped.append((group, fate))
            elif self._settings.surplus == "carry":
                self._carried.append(group)
            else:
                step.dropped.append((group, "surplus"))
        if self._settings.surplus == "requeue":
            self._prompts.push_front([g.prompt for g, fate in step.judged.values() if fate == "kept"])
        step.judged.clear()

    def _check_verifier(self, step: _Step) -> None:
        """Stops a run whose verifier is broken, as soon as a batch's worth of groups shows it."""
        judged = len(step.sampled)
        errors = [group for group in step.sampled if any(verdict.failed for verdict in group.verdicts)]
        if judged >= self._settings.prompts_per_step and len(errors) > self._max_error_share * judged:
            first = next(verdict.detail for group in errors for verdict in group.verdicts if verdict.failed)
            line, _, traceback = first.partition("\n")
            raise UserError(
                f"reward.verifier: failed on {len(errors)} of {judged} groups, more than reward.max_error_share "
                f"{self._max_error_share:g} allows; the first failure: {line or 'no detail'}",
                more=traceback,
            )


@dataclass(slots=True)
class _Acceptance:
    """The share of groups that are kept, as seen lately; it starts from a guess worth a few groups."""

    kept: float = 3.0
    seen: float = 4.0

    memory = 64.0
    """Groups after which an observation has lost most of its weight: the policy moves."""

    def observe(self, kept: bool) -> None:
        fading = 1 - 1 / self.memory
        self.kept = self.kept * fading + kept
        self.seen = self.seen * fading + 1

    @property
    def rate(self) -> float:
        return max(self.kept / self.seen, 0.02)


def _reasons(step: _Step) -> str:
    counts = Counter(fate for _, fate in step.dropped)
    return ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in counts.items()) or "none dropped"


def _sample_from(entry: Mapping[str, Any]) -> Sample:
    return Sample(
        token_ids=tuple(entry["token_ids"]),
        logps=tuple(entry["logps"]),
        text=entry["text"],
        finish_reason=entry["finish_reason"],
        versions=(entry["versions"][0], entry["versions"][1]),
    )
