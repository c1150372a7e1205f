"""Dynamic sampling: keeps groups in flight until the batch of a step is full, and records the fate of each group.

With `surplus: carry`, groups still in flight when the batch is full continue in the next step with the new weights;
`pacing.py` limits how many are started. A step ends only when no group is left that would be too old in the next one.
A step can be interrupted while it samples: what it has sampled so far is part of the sampler's state, and the next
`fill` continues with it.

With `during_updates`, for engines that have GPUs of their own, a step leaves its unfinished groups in the engine, and
as many more as pacing allows and `sampling.ahead` asks for. The engine continues with them during the update, and loads
the new weights in mid-generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dapo_rl.base.format import counted
from dapo_rl.base.quote import TRACEBACK_LIMIT, shorten
from dapo_rl.choices import Masking
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Engine, SamplingParams
from dapo_rl.errors import StopRequested, UserError
from dapo_rl.rollout.acceptance import Acceptance
from dapo_rl.rollout.admission import Admission, at_cap
from dapo_rl.rollout.fill import Fill, Filling
from dapo_rl.rollout.flights import Flight, Flights
from dapo_rl.rollout.grading import Grading
from dapo_rl.rollout.interrupted import Interrupted, Remains
from dapo_rl.rollout.judging import GroupFilter, Judging, fate_of
from dapo_rl.rollout.pacing import Ahead, may_start
from dapo_rl.rollout.sampler_state import SamplerState
from dapo_rl.rollout.verdicts import check_nothing
from dapo_rl.types import Group, Prompt, Verifier

LONG_WAIT_S = 10.0
LOOK_S = 0.05
"""Seconds between checks for verdicts, with `wait_for_verdicts: false`."""


class Prompts(Protocol):
    """Where prompts come from."""

    def draw(self) -> Prompt: ...

    def push_front(self, prompts: list[Prompt]) -> None: ...

    def find(self, prompt_id: str) -> Prompt: ...

    def rest(self, prompt: Prompt, epochs: int) -> None: ...


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
        masking: Masking = "none",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_step: Callable[[int], None] = lambda version: None,
        vocabulary: int = 2**31 - 1,
        during_updates: bool = False,
    ) -> None:
        """`during_updates` needs `surplus: carry`."""
        self._during_updates = during_updates
        self._prompts, self._engine, self._settings, self._cap = prompts, engine, settings, cap
        self._max_error_share, self._keep, self._masking = max_error_share, keep, masking
        self._on_progress, self._on_step = on_progress, on_step
        self._longest, self._vocabulary = params.max_new_tokens, vocabulary
        self._flights = Flights(engine, params, settings.group_size, seed)
        self._judging = Judging(verifier, settings)
        self._admission = Admission()
        self._acceptance, self._grading = Acceptance(), Grading()
        self._told_of_waiting = False
        self._check = check_nothing
        self._interrupted: Interrupted | None = None
        self._failed: Filling | None = None
        """The batch of a `fill` that raised an error."""

    def fill(self, n: int, check: Callable[[], None] = check_nothing) -> Fill:
        """Samples until `n` groups are kept, or the cap is reached. More are kept if they would be too old later.

        `check` is called every fraction of a second. If it raises a StopRequested, the fill ends early: nothing that
        was sampled is lost, `save` saves it, and the next fill continues with it.
        """
        self._check, started = check, time.perf_counter()
        filling = self._begin(n)
        try:
            return self._fill(filling)
        except StopRequested:
            filling.earlier_seconds += time.perf_counter() - started
            self._interrupt(filling)
            raise
        except Exception:
            self._failed = filling
            raise
        finally:
            self._check = check_nothing  # it refers to the run, which refers to this sampler

    def land(self) -> None:
        """Between steps: takes work that continues during updates out of the engine. The next `fill` continues with
        it."""
        if self._flights.aboard:
            self._on_step(self._engine.version)  # what has finished meanwhile is judged as part of the next step
            self._interrupt(Filling(0))

    def _interrupt(self, filling: Filling) -> None:
        self._land(filling)
        self._interrupted = Interrupted(filling, self._admission.rejected, self._judging.interrupt())

    def _begin(self, n: int) -> Filling:
        """A new batch, or the one that was interrupted."""
        self._failed = None
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is None:
            filling = Filling(n)
            self._on_step(self._engine.version)
        else:
            filling = interrupted.filling
            filling.n = n
            self._judging.resume(interrupted.unread)
        filling.due = self._due(self._flights.next_draw - filling.drawn)
        self._flights.resume()
        return filling

    def _fill(self, filling: Filling) -> Fill:
        self._judge_due(filling)
        while True:
            first_out = min((flight.draw for flight in self._out()), default=math.inf)
            self._admission.admit(filling, first_out)
            self._check_verifier(filling)
            self._on_progress(len(filling.kept), max(filling.n, len(filling.kept)))
            if not filling.missing and first_out > filling.due:
                break
            self._top_up(filling)
            if not self._out():
                break
            self._advance(filling)
        if not self._during_updates:
            self._land(filling)
        self._judge(filling, everything=True)
        filled_up, at_the_cap = at_cap(filling, self._settings) if filling.missing else (frozenset[int](), None)
        self._settle(filling)
        return Fill(
            kept=tuple(filling.kept),
            dropped=tuple(filling.dropped),
            sampled=tuple(filling.sampled),
            version=self._engine.version,
            filled_up=filled_up,
            carried_over=len(self._admission),
            in_flight=len(self._flights),
            tokens_generated=filling.tokens_generated,
            tokens_cancelled=filling.cancelled_tokens,
            generate_seconds=filling.generate_seconds,
            verify_seconds=filling.verify_seconds,
            earlier_seconds=filling.earlier_seconds,
            notes=tuple(note for note in (*filling.notes, at_the_cap, self._late_verdicts(filling)) if note),
        )

    @property
    def carried(self) -> tuple[Group, ...]:
        """Good groups that wait for the next step, in the order drawn."""
        return self._admission.carried

    @property
    def carried_tokens(self) -> int:
        """Tokens of finished samples, in carried groups, in groups still in flight, and in an interrupted step."""
        own = 0 if self._interrupted is None else self._interrupted.waiting_tokens
        carried = sum(group.tokens for group in self.carried)
        return own + carried + sum(flight.finished_tokens for flight in self._flights)

    @property
    def begun_tokens(self) -> int:
        """Between steps: tokens of unfinished samples."""
        return sum(flight.request.tokens for flight in self._flights)

    @property
    def so_far(self) -> Fill | None:
        """The result so far of a step that was interrupted."""
        return None if self._interrupted is None else self._interrupted.so_far()

    @property
    def has_failed(self) -> bool:
        """Whether the last `fill` raised an error."""
        return self._failed is not None

    def remains(self) -> Remains | None:
        """What a `fill` that raised an error had sampled; None if the last one did not. The engine is not asked."""
        if (filling := self._failed) is None:
            return None
        dropped = (*filling.dropped, *self._admission.rejected)
        groups = {group.draw: group for group in (*filling.sampled, *filling.kept, *self.carried)}
        for unread in self._judging.interrupt():
            groups[unread.flight.draw] = unread.flight.group(unread.verdicts or ())
        for flight in self._flights:
            if flight.finished_tokens:
                groups[flight.draw] = flight.group()
        for group, _ in dropped:
            groups.pop(group.draw, None)
        return Remains.of(filling, dropped, tuple(groups[draw] for draw in sorted(groups)))

    @property
    def unfinished(self) -> list[Prompt]:
        """Between steps: the prompts of carried groups, of groups in flight, and of an interrupted step."""
        own = [] if self._interrupted is None else self._interrupted.prompts
        return [*(group.prompt for group in self.carried), *(flight.prompt for flight in self._flights), *own]

    def save(self, directory: Path) -> None:
        """Between steps, and after an interrupted `fill`: saves everything that the next `fill` depends on, except
        prompts and weights."""
        self.land()
        draw, flights = self._flights.next_draw, tuple(self._flights)
        state = SamplerState(draw, self._acceptance, self._grading, self.carried, flights, self._interrupted)
        state.write(directory)

    def load(self, directory: Path) -> None:
        size = self._settings.group_size
        state = SamplerState.read(
            directory, self._prompts.find, self._flights.request, size, self._longest, self._vocabulary
        )
        self._flights.next_draw, self._acceptance, self._grading = state.next_draw, state.acceptance, state.grading
        self._interrupted, self._failed = state.interrupted, None
        self._admission = Admission(state.carried, state.interrupted.rejected if state.interrupted else ())
        self._flights.land()
        self._judging.interrupt()
        self._flights.remove(lambda flight: True)
        for flight in state.flights:
            self._flights.add(flight)

    def _out(self) -> list[Flight]:
        """Groups without verdicts."""
        return [*self._flights, *self._judging]

    def _top_up(self, filling: Filling) -> None:
        """Starts as many groups as the recent acceptance rate says are needed, with those drawn ahead, and as pacing
        allows."""
        if self._settings.dynamic_batch:
            # The batch is drawn once, and again only if none of it can be trained on.
            wanted = filling.n if not self._out() and not filling.kept else 0
            for _ in range(min(wanted, self._cap - filling.drawn)):
                self._start(filling)
            return
        good = self._admission.good
        missing = filling.missing - good + self._settings.ahead * filling.n
        ahead = Ahead(len(filling.kept) + good)
        for flight in self._out():
            ahead.add(self._chance(flight.prompt))
        missing -= ahead.mean
        while missing > 1e-9 and filling.drawn < self._cap and may_start(self._settings, filling.n, ahead):
            chance = self._chance(self._start(filling))
            missing -= chance
            ahead.add(chance)

    def _due(self, first: int) -> int:
        """The last draw before `first`, the first of this step, that would be too old in the next step; -1 if there is
        none. As versions increase with draws, so would be all draws before it."""
        if self._settings.surplus != "carry":
            return -1
        begun = [(flight.draw, flight.version) for flight in self._out()]
        begun += [(group.draw, group.first_version) for group in self.carried]
        oldest = self._engine.version - self._settings.max_staleness
        return max((draw for draw, version in begun if version <= oldest and draw < first), default=-1)

    def _chance(self, prompt: Prompt) -> float:
        """The probability that a group of this prompt is kept."""
        return self._acceptance.rate(prompt.data_source) if self._settings.dynamic else 1.0

    def _start(self, filling: Filling) -> Prompt:
        filling.drawn += 1
        return self._flights.start(self._prompts.draw()).prompt

    def _advance(self, filling: Filling) -> None:
        """Polls the engine, submits complete groups to the verifier, and reads the verdicts that are due."""
        started = time.perf_counter()
        waits = self._settings.wait_for_verdicts
        try:
            whole, tokens = self._flights.poll(LOOK_S if self._judging and not waits else None, self._check)
        finally:
            filling.generate_seconds += time.perf_counter() - started
        filling.finished_tokens += tokens
        self._judging.start(whole)
        self._judge_due(filling)

    def _judge_due(self, filling: Filling) -> None:
        waits = self._settings.wait_for_verdicts
        self._judge(filling, everything=not self._flights or (waits and self._could_be_full(filling)))

    def _could_be_full(self, filling: Filling) -> bool:
        """Whether the batch is full if all pending verdicts are good. The sampler then waits for them, because the next
        sample may take long to finish."""
        return self._admission.good + len(self._judging) >= filling.missing

    def _judge(self, filling: Filling, everything: bool) -> None:
        started = time.perf_counter()
        for group in self._judging.finish(everything=everything, check=self._check):
            filling.sampled.append(group)  # before a filter that may raise
            if self._settings.dynamic and self._settings.metric == "auto" and (note := self._grading.observe(group)):
                filling.notes.append(note)
            fate = fate_of(group, self._settings, self._keep, self._grading, self._masking)
            self._acceptance.observe(group.prompt.data_source, fate == "kept")
            if fate == "all_correct" and self._settings.retire:
                self._prompts.rest(group.prompt, self._settings.retire)
            self._admission.add(group, fate)
        filling.verify_seconds += time.perf_counter() - started

    def _land(self, filling: Filling) -> None:
        """Takes all work out of the engine. Samples may have finished since the last poll."""
        whole, tokens = self._flights.land()
        filling.finished_tokens += tokens
        if whole:
            self._judging.start(whole)

    def _settle(self, filling: Filling) -> None:
        """Ends a step: carries, requeues or drops what is left."""
        if self._during_updates:
            self._top_up(filling)
            self._flights.go_on()
            self._admission.settle(filling, self._settings.surplus)
            return
        surplus = self._settings.surplus
        untouched = self._flights.remove(lambda flight: flight.request.untouched)
        filling.drawn -= len(untouched)
        cancelled = self._flights.remove(lambda flight: surplus != "carry")
        for flight in cancelled:
            # Its finished samples have already been counted as generated.
            filling.cancelled_tokens += flight.request.tokens + flight.finished_tokens
            filling.finished_tokens -= flight.finished_tokens
        judged = self._admission.settle(filling, surplus)
        # Whether a surplus group has finished says how fast its prompt is, and must not decide whether it is drawn
        # again: for that reason rejected groups are, too.
        again = [(flight.draw, flight.prompt) for flight in untouched]
        if surplus == "requeue":
            again += [(flight.draw, flight.prompt) for flight in cancelled]
            again += [(group.draw, group.prompt) for group in judged]
        self._prompts.push_front([prompt for _, prompt in sorted(again, key=lambda entry: entry[0])])

    def _late_verdicts(self, filling: Filling) -> str | None:
        """Tells once that the engine waits for verdicts, if it does so for a good part of a step."""
        waited, worked = filling.verify_seconds, filling.generate_seconds
        if self._told_of_waiting or not self._settings.wait_for_verdicts or waited < max(LONG_WAIT_S, worked / 4):
            return None
        self._told_of_waiting = True
        return (
            f"the engine waited {waited:.0f} s for verdicts and worked for {worked:.0f} s; raise reward.workers, or "
            "set sampling.wait_for_verdicts=false, with which a seed no longer gives the same run"
        )

    def _check_verifier(self, filling: Filling) -> None:
        """Stops a run whose verifier is broken, once a batch's worth of groups has been judged."""
        judged = len(filling.sampled)
        errors = [group for group in filling.sampled if any(verdict.failed for verdict in group.verdicts)]
        if judged >= self._settings.prompts_per_step and len(errors) > self._max_error_share * judged:
            first = next(verdict.detail for group in errors for verdict in group.verdicts if verdict.failed)
            line, _, traceback = first.partition("\n")
            raise UserError(
                f"reward.verifier: failed on {len(errors)} of {counted(judged, 'group')}, more than "
                f"reward.max_error_share {self._max_error_share:g} allows; the first failure: "
                f"{shorten(line) or 'no detail'}",
                more=shorten(traceback, TRACEBACK_LIMIT),
            )
