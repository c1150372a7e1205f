"""Dynamic sampling: keeps groups in flight until a step's batch is full, and knows what became of each one.

Groups are admitted in the order in which their prompts were drawn. Whoever takes the groups that finish first prefers
short answers. What has begun when a batch is full goes on in the next step, under the new weights (`surplus: carry`).

Every decision follows the order of draws, polls of the engine and weight versions. Verdicts are computed while the
engine goes on; one is looked at a fixed number of polls after its group was whole, not when it happens to be there.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from dapo_rl.algo import dynamic_sampling_filter
from dapo_rl.base.quote import TRACEBACK_LIMIT, describe, shorten
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import CapReachedError, NonFiniteError, UserError
from dapo_rl.fates import FATES, Fate
from dapo_rl.rollout.acceptance import Acceptance
from dapo_rl.rollout.draw import derive_seed
from dapo_rl.rollout.engine import Engine, Request, SamplingParams
from dapo_rl.rollout.verdicts import submit
from dapo_rl.types import Group, Pending, Prompt, Sample, Verdict, Verifier

GroupFilter = Callable[[Group], bool]

VERDICT_POLLS = 4
"""Polls of the engine after which a verdict is waited for: time for it to be computed meanwhile."""


class Prompts(Protocol):
    """Where prompts come from."""

    def draw(self) -> Prompt: ...

    def push_front(self, prompts: list[Prompt]) -> None: ...

    def find(self, prompt_id: str) -> Prompt: ...

    def rest(self, prompt: Prompt, epochs: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Fill:
    """The outcome of filling one batch."""

    kept: tuple[Group, ...]
    """In the order drawn."""
    dropped: tuple[tuple[Group, Fate], ...]
    sampled: tuple[Group, ...]
    """All groups that got their verdicts in this step, whatever became of them; `kept` may hold older ones too."""
    filled_up: frozenset[int]
    """The draws of groups without a signal that `on_cap: fill` put into the batch: they count, and teach nothing."""
    carried_over: int
    """Good groups that wait for the next step."""
    in_flight: int
    """Groups that go on in the next step."""
    tokens_generated: int
    """Of samples that ended in this step: finished, or cancelled."""
    tokens_cancelled: int
    """Of groups that were not wanted any more before they were whole."""
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
    version: int
    """The weights that it began with."""
    samples: list[Sample | None]

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples if sample is not None)


@dataclass(slots=True)
class _Judging:
    """A whole group whose verdicts are being computed."""

    poll: int
    flight: _Flight
    verdicts: Pending


@dataclass(slots=True)
class _Step:
    """What has happened so far while a batch is being filled."""

    n: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[tuple[Group, Fate]] = field(default_factory=list)
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
        self._polls = 0
        self._flights: dict[str, _Flight] = {}
        self._judging: deque[_Judging] = deque()
        self._judged: dict[int, tuple[Group, Fate]] = {}
        """Groups with verdicts that wait for an earlier draw to get its own, or for the next step."""
        self._acceptance = Acceptance()

    def fill(self, n: int) -> Fill:
        """Samples until `n` groups are kept, or the cap is reached."""
        step = _Step(n)
        self._drop_stale(step)
        while True:
            self._admit(step, n)
            self._check_verifier(step)
            self._on_progress(len(step.kept), n)
            if len(step.kept) == n:
                break
            self._top_up(step, n)
            if not self._flights and not self._judging:
                break
            self._advance(step)
        filled_up, note = self._at_cap(step, n) if len(step.kept) < n else (frozenset(), None)
        self._end(step)
        return Fill(
            kept=tuple(step.kept),
            dropped=tuple(step.dropped),
            sampled=tuple(step.sampled),
            filled_up=filled_up,
            carried_over=len(self._judged),
            in_flight=len(self._flights),
            tokens_generated=step.tokens + step.cancelled,
            tokens_cancelled=step.cancelled,
            generate_seconds=step.generate_seconds,
            verify_seconds=step.verify_seconds,
            note=note,
        )

    @property
    def carried(self) -> tuple[Group, ...]:
        """Good groups that wait for the next step, in the order drawn."""
        return tuple(self._judged[draw][0] for draw in sorted(self._judged))

    @property
    def carried_tokens(self) -> int:
        """Tokens of finished samples that wait for the next step, with their group or for the rest of it."""
        waiting = sum(group.tokens for group in self.carried)
        return waiting + sum(flight.tokens for flight in self._flights.values())

    def state(self) -> dict[str, Any]:
        """Everything that the next `fill` depends on beside the engine, as JSON; between two of them."""
        return {
            "next_draw": self._next_draw,
            "acceptance": self._acceptance.state(),
            "carried": [
                {
                    "draw": group.draw,
                    "prompt": group.prompt.id,
                    "samples": [asdict(sample) for sample in group.samples],
                    "verdicts": [asdict(verdict) for verdict in group.verdicts],
                }
                for group in self.carried
            ],
            "flights": [
                {
                    "draw": flight.draw,
                    "prompt": flight.prompt.id,
                    "version": flight.version,
                    "samples": [None if sample is None else asdict(sample) for sample in flight.samples],
                }
                for flight in self._flights.values()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next_draw = state["next_draw"]
        self._acceptance = Acceptance.from_state(state["acceptance"])
        groups = [
            Group(
                draw=entry["draw"],
                prompt=self._prompts.find(entry["prompt"]),
                samples=tuple(_sample_from(sample) for sample in entry["samples"]),
                verdicts=tuple(Verdict(**verdict) for verdict in entry["verdicts"]),
            )
            for entry in state["carried"]
        ]
        self._judged = {group.draw: (group, "kept") for group in groups}
        self._flights = {
            _request_id(entry["draw"]): _Flight(
                entry["draw"],
                self._prompts.find(entry["prompt"]),
                entry["version"],
                [None if sample is None else _sample_from(sample) for sample in entry["samples"]],
            )
            for entry in state["flights"]
        }

    # Starting groups.

    def _top_up(self, step: _Step, n: int) -> None:
        """Starts as many groups as are likely to be needed, at the acceptance rate seen so far."""
        out = [*self._flights.values(), *(judging.flight for judging in self._judging)]
        if self._settings.dynamic_batch:
            # One draw of the batch; another only where nothing of it can be trained on.
            wanted = n if not out and not step.kept else 0
            for _ in range(min(wanted, self._cap - step.drawn)):
                self._start(step)
            return
        missing = float(n - len(step.kept) - sum(fate == "kept" for _, fate in self._judged.values()))
        missing -= sum(self._chance(flight.prompt) for flight in out)
        while missing > 1e-9 and step.drawn < self._cap:
            missing -= self._chance(self._start(step))

    def _chance(self, prompt: Prompt) -> float:
        """That a group of this prompt is kept."""
        return self._acceptance.rate(prompt.data_source) if self._settings.dynamic else 1.0

    def _start(self, step: _Step) -> Prompt:
        prompt, draw = self._prompts.draw(), self._next_draw
        request = Request(
            id=_request_id(draw),
            prompt_ids=prompt.token_ids,
            count=self._settings.group_size,
            params=self._params,
            seed=derive_seed(self._seed, prompt.id, draw),
        )
        self._engine.submit(request)
        self._flights[request.id] = _Flight(draw, prompt, self._engine.version, [None] * request.count)
        self._next_draw += 1
        step.drawn += 1
        return prompt

    # Sampling and judging.

    def _advance(self, step: _Step) -> None:
        """Lets the engine go on, has whole groups judged, and looks at the verdicts whose time has come."""
        started = time.perf_counter()
        completions = self._engine.poll()
        self._polls += 1
        step.generate_seconds += time.perf_counter() - started
        for completion in completions:
            flight = self._flights[completion.request_id]
            flight.samples[completion.index] = completion.sample
            step.tokens += len(completion.sample.token_ids)
            if not all(map(math.isfinite, completion.sample.logps)):
                raise NonFiniteError("the engine sampled a token whose log-probability is not a number")
            samples = [sample for sample in flight.samples if sample is not None]
            if len(samples) == len(flight.samples):
                del self._flights[completion.request_id]
                verdicts = submit(self._verifier, flight.prompt, samples)
                self._judging.append(_Judging(self._polls, flight, verdicts))
        self._judge(step, everything=not self._flights or self._could_be_full(step))

    def _could_be_full(self, step: _Step) -> bool:
        """Whether the batch is full if all verdicts are good. They are waited for then: the next sample to finish may
        be a long one."""
        good = len(step.kept) + sum(fate == "kept" for _, fate in self._judged.values())
        return good + len(self._judging) >= step.n

    def _judge(self, step: _Step, everything: bool) -> None:
        started = time.perf_counter()
        while self._judging and (everything or self._polls - self._judging[0].poll >= VERDICT_POLLS):
            judging = self._judging.popleft()
            flight = judging.flight
            samples = tuple(sample for sample in flight.samples if sample is not None)
            group = Group(flight.draw, flight.prompt, samples, tuple(judging.verdicts.result()))
            fate = self._fate(group)
            self._acceptance.observe(group.prompt.data_source, fate == "kept")
            if fate == "all_correct" and self._settings.retire:
                self._prompts.rest(group.prompt, self._settings.retire)
            self._judged[flight.draw] = (group, fate)
            step.sampled.append(group)
        step.verify_seconds += time.perf_counter() - started

    def _fate(self, group: Group) -> Fate:
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
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit among them: sys.exit(0) in a filter is not a finished run
            raise UserError(
                f"sampling.filter: {describe(error)}, on the group of prompt {group.prompt.id}; "
                "it is called with a group (prompt, samples, verdicts) and returns whether to keep it"
            ) from error

    # Admission.

    def _admit(self, step: _Step, n: int) -> None:
        """Takes judged groups in the order drawn; the first one that is still out holds up those after it."""
        out = [*self._flights.values(), *(judging.flight for judging in self._judging)]
        first_out = min((flight.draw for flight in out), default=math.inf)
        for draw in sorted(self._judged):
            if len(step.kept) == n or draw > first_out:
                break
            group, fate = self._judged.pop(draw)
            if fate == "kept":
                step.kept.append(group)
            else:
                step.dropped.append((group, fate))

    def _drop_stale(self, step: _Step) -> None:
        """What is left of earlier steps and was begun with weights that are too old."""
        oldest = self._engine.version - self._settings.max_staleness
        for draw in sorted(self._judged):
            group = self._judged[draw][0]
            if min(sample.versions[0] for sample in group.samples) < oldest:
                step.dropped.append((self._judged.pop(draw)[0], "stale"))
        self._put_back(step, [name for name, flight in self._flights.items() if flight.version < oldest])

    def _at_cap(self, step: _Step, n: int) -> tuple[frozenset[int], str | None]:
        """The batch is not full and no more may be drawn: a policy decides, and says what it did."""
        nothing: frozenset[int] = frozenset()
        if self._settings.dynamic_batch and step.kept:
            return nothing, None
        found = f"{step.drawn} groups drawn, {len(step.kept)} of {n} kept ({_reasons(step)})"
        if self._settings.on_cap == "fill":
            spare = [group for group, fate in step.dropped if not FATES[fate].signal]
            chosen = spare[: n - len(step.kept)]
            draws = frozenset(group.draw for group in chosen)
            step.dropped = [entry for entry in step.dropped if entry[0].draw not in draws]
            step.kept = sorted([*step.kept, *chosen], key=lambda group: group.draw)
            if step.kept:
                return draws, f"sampling.cap reached: {found}; filled up with {len(draws)} uninformative groups"
        if self._settings.on_cap == "partial" and step.kept:
            return nothing, f"sampling.cap reached: {found}; training on {len(step.kept)} groups"
        raise CapReachedError(
            f"sampling.cap: {found}; raise sampling.cap, use easier or harder prompts, "
            "or choose sampling.on_cap=partial or fill"
        )

    # The end of a step.

    def _end(self, step: _Step) -> None:
        """Settles what is left over, and waits for the verdicts that are still out."""
        surplus = self._settings.surplus
        waiting = self._engine.waiting
        unused = [name for name in self._flights if name in waiting]
        self._put_back(step, unused)
        step.drawn -= len(unused)
        if surplus != "carry":
            self._put_back(step, list(self._flights))
        elif not self._engine.keeps_begun:
            while self._flights:
                self._advance(step)
        self._judge(step, everything=True)
        again: list[Prompt] = []
        for draw in sorted(self._judged):
            group, fate = self._judged[draw]
            if fate == "kept" and surplus == "carry":
                continue
            if fate == "kept" and surplus == "requeue":
                again.append(group.prompt)
            step.dropped.append((group, "surplus" if fate == "kept" else fate))
            del self._judged[draw]
        self._prompts.push_front(again)

    def _put_back(self, step: _Step, names: list[str]) -> None:
        """Groups that are not wanted any more before they are whole: their prompts go to the front of the stream."""
        unused = sorted((self._flights.pop(name) for name in names), key=lambda flight: flight.draw)
        for flight in unused:
            # Those of its samples that had finished are counted as generated already.
            step.cancelled += self._engine.cancel(_request_id(flight.draw)) + flight.tokens
            step.tokens -= flight.tokens
        self._prompts.push_front([flight.prompt for flight in unused])

    def _check_verifier(self, step: _Step) -> None:
        """Stops a run whose verifier is broken, as soon as a batch's worth of groups shows it."""
        judged = len(step.sampled)
        errors = [group for group in step.sampled if any(verdict.failed for verdict in group.verdicts)]
        if judged >= self._settings.prompts_per_step and len(errors) > self._max_error_share * judged:
            first = next(verdict.detail for group in errors for verdict in group.verdicts if verdict.failed)
            line, _, traceback = first.partition("\n")
            raise UserError(
                f"reward.verifier: failed on {len(errors)} of {judged} groups, more than reward.max_error_share "
                f"{self._max_error_share:g} allows; the first failure: {shorten(line) or 'no detail'}",
                more=shorten(traceback, TRACEBACK_LIMIT),
            )


def _request_id(draw: int) -> str:
    return f"draw-{draw}"


def _reasons(step: _Step) -> str:
    counts = Counter(fate for _, fate in step.dropped)
    return ", ".join(f"{count} {FATES[fate].label}" for fate, count in counts.items()) or "none dropped"


def _sample_from(entry: Mapping[str, Any]) -> Sample:
    return Sample(
        token_ids=tuple(entry["token_ids"]),
        logps=tuple(entry["logps"]),
        text=entry["text"],
        finish_reason=entry["finish_reason"],
        versions=(entry["versions"][0], entry["versions"][1]),
    )
