"""Dynamic sampling: keeps groups in flight until the batch of a step is full, and records the outcome of each group.

With `surplus: carry`, groups still in flight when the batch is full continue in the next step with the new weights;
`staleness.py` limits how many are started. A step ends only when no group is left that would be too old in the next.
A step can be paused while it samples: the sampler's state then includes its batch so far, and the next `fill` continues
with it.

With `during_updates`, for engines that have GPUs of their own, a step leaves its unfinished groups in the engine, and
as many more as pacing allows and `sampling.ahead` asks for. The engine continues with them during the update, and loads
the new weights in mid-generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dapo_rl.choices import Masking
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs import OneTurn
from dapo_rl.errors import StopRequested
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.batch_builder import Admission, FailedBatch, PausedBatch, SampledBatch, at_cap
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.dynamic_sampling import Grading, GroupFilter, drops_alike, has_spread, outcome_of
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.failures import check_environment, check_verifier
from dapo_rl.rollout.pending_steps import check_nothing
from dapo_rl.rollout.policy_answers import policy_of
from dapo_rl.rollout.sampler_state import SamplerState
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight
from dapo_rl.rollout.staleness import Ahead, may_start
from dapo_rl.types import Group, Prompt, Verifier

LONG_WAIT_S = 10.0


class Prompts(Protocol):
    """Where prompts come from."""

    def draw(self) -> Prompt: ...

    def push_front(self, prompts: list[Prompt]) -> None: ...

    def find(self, prompt_id: str) -> Prompt: ...

    def skip(self, prompt: Prompt, epochs: int) -> None: ...

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None: ...


class Sampler:
    def __init__(
        self,
        prompts: Prompts,
        engine: Engine,
        verifier: Verifier | None,
        params: SamplingParams,
        settings: SamplingSettings,
        *,
        cap: int,
        seed: int,
        max_error_share: float = 1.0,
        keep: GroupFilter | None = None,
        masking: Masking = "none",
        decoupled: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_step: Callable[[int], None] = lambda version: None,
        vocabulary: int = 2**31 - 1,
        during_updates: bool = False,
        conversations: Conversations | None = None,
    ) -> None:
        """`verifier` is None if the environment of the `conversations` gives the verdicts. `during_updates` needs
        `surplus: carry`. `decoupled` says that rewards are normalised each on its own."""
        self._during_updates = during_updates
        self._prompts, self._engine, self._settings, self._cap = prompts, engine, settings, cap
        self._max_error_share, self._keep = max_error_share, keep
        self._masking, self._decoupled = masking, decoupled
        self._on_progress, self._on_step = on_progress, on_step
        self._longest = params.max_new_tokens if conversations is None else conversations.context
        self._vocabulary = vocabulary
        self._next_draw = 0

        def request(draw: int, prompt: Prompt, version: int) -> Request:  # a method would be a reference cycle
            own_seed, own = derive_seed(seed, prompt.id, draw), params
            if settings.length_stages:
                own = replace(params, max_new_tokens=settings.longest_response(version), staged=True)
            return Request(f"draw-{draw}", prompt.token_ids, settings.group_size, own, own_seed)

        self._episodes = Episodes(
            engine,
            None if verifier is None else OneTurn(verifier, drops_alike(settings)),
            request,
            longest=settings.max_new_tokens,
            waits=settings.wait_for_verdicts,
            conversations=conversations,
            policy=policy_of(verifier),
        )
        self._restarted = Restarted()
        self._admission = Admission()
        self._acceptance, self._grading = Acceptance(), Grading()
        self._told_of_waiting = False
        self._check, self._began = check_nothing, 0.0
        self._paused: PausedBatch | None = None
        self._failed: SampledBatch | None = None
        """The batch of a `fill` that raised an error."""
        self._full: SampledBatch | None = None
        """The batch that the last `fill` has returned."""

    @property
    def has_environment(self) -> bool:
        return self._episodes.conversations is not None

    def fill(self, n: int, check: Callable[[], None] = check_nothing) -> SampledBatch:
        """Samples until `n` groups are kept, or the cap is reached. More are kept if they would be too old later.

        `check` is called every fraction of a second. If it raises a StopRequested, the fill ends early: nothing that
        was sampled is lost, `save` saves it, and the next fill continues with it.
        """
        self._check, self._began = check, time.perf_counter()
        batch = self._begin(n)
        try:
            return self._fill(batch)
        except StopRequested:
            batch.earlier_seconds += time.perf_counter() - self._began
            self._pause(batch)
            raise
        except Exception:
            self._failed = batch
            raise
        finally:
            self._check = check_nothing  # it refers to the run, which refers to this sampler

    def drain(self) -> None:
        """Between steps: takes work that continues during updates out of the engine. The next `fill` continues with
        it."""
        if self._episodes.submitted:
            self._on_step(self._engine.version)  # samples that finish during the update belong to the next step
            self._pause(SampledBatch())

    def take_back(self) -> None:
        """After a `fill` whose batch was not trained on: `save` saves the batch, and the next `fill` returns it."""
        assert self._full is not None
        self._full.earlier_seconds += time.perf_counter() - self._began
        self._pause(self._full)

    def _pause(self, batch: SampledBatch) -> None:
        batch.tokens_finished += self._episodes.drain()
        self._paused = PausedBatch(batch, self._admission.rejected, self._episodes.pause())

    def _begin(self, n: int) -> SampledBatch:
        """A new batch, or the one that was interrupted."""
        self._failed = self._full = None
        paused, self._paused = self._paused, None
        if paused is None:
            batch = SampledBatch(n=n)
            self._on_step(self._engine.version)
        else:
            batch = paused.batch
            batch.n = n
            self._episodes.unpause(paused.unread)
        batch.tokens_restarted += sum(self._restarted)
        batch.tokens_finished -= self._restarted.finished
        self._restarted = Restarted()
        batch.due = self._due(self._next_draw - batch.drawn)
        self._episodes.resume()
        return batch

    def _fill(self, batch: SampledBatch) -> SampledBatch:
        self._judge_due(batch)
        while True:
            first_out = min((flight.draw for flight in self._episodes), default=math.inf)
            self._admission.admit(batch, first_out)
            self._check_failures(batch)
            self._on_progress(len(batch.kept), max(batch.n, len(batch.kept)))
            if not batch.missing and first_out > batch.due:
                break
            self._top_up(batch)
            if not len(self._episodes):
                break
            self._advance(batch)
        if not self._during_updates:
            batch.tokens_finished += self._episodes.drain()
        self._judge(batch, everything=True)
        dropped = batch.dropped
        filled_up, at_the_cap = at_cap(batch, self._settings) if batch.missing else (frozenset[int](), None)
        self._settle(batch)
        self._full = batch.without(filled_up, dropped)
        return replace(
            batch,
            version=self._engine.version,
            filled_up=filled_up,
            carried_over=len(self._admission),
            in_flight=len(self._episodes.unfinished),
            notes=[note for note in (*batch.notes, at_the_cap, self._late_verdicts(batch)) if note],
        )

    @property
    def carried(self) -> tuple[Group, ...]:
        """Good groups that wait for the next step, in the order drawn."""
        return self._admission.carried

    @property
    def carried_tokens(self) -> int:
        """Tokens of finished samples, in carried groups, in groups still in flight, and in an interrupted step."""
        own = 0 if self._paused is None else self._paused.waiting_tokens
        carried = sum(group.tokens for group in self.carried)
        return own + carried + sum(flight.finished_tokens for flight in self._episodes.unfinished)

    @property
    def in_flight_tokens(self) -> int:
        """Between steps: tokens of unfinished samples."""
        return sum(flight.partial_tokens for flight in self._episodes.unfinished)

    @property
    def so_far(self) -> SampledBatch | None:
        """The result so far of a step that was interrupted. Kept groups are not in it: nothing was trained on them."""
        return None if self._paused is None else replace(self._paused.batch, kept=[])

    @property
    def has_failed(self) -> bool:
        """Whether the last `fill` raised an error."""
        return self._failed is not None

    def remains(self) -> FailedBatch | None:
        """What a `fill` that raised an error had sampled; None if the last one did not. The engine is not asked."""
        if (batch := self._failed) is None:
            return None
        dropped = [*batch.dropped, *self._admission.rejected]
        groups = {group.draw: group for group in (*batch.sampled, *batch.kept, *self.carried)}
        for unread in self._episodes.pause():
            groups[unread.flight.draw] = unread.flight.group(unread.verdicts or ())
        for flight in self._episodes.unfinished:
            if flight.finished_tokens:
                groups[flight.draw] = flight.group()
        for group, _ in dropped:
            groups.pop(group.draw, None)
        return FailedBatch(replace(batch, kept=[], dropped=dropped), [groups[draw] for draw in sorted(groups)])

    @property
    def unfinished(self) -> list[Prompt]:
        """Between steps: the prompts of carried groups, of groups in flight, and of an interrupted step."""
        own = [] if self._paused is None else self._paused.prompts
        return [
            *(group.prompt for group in self.carried),
            *(flight.prompt for flight in self._episodes.unfinished),
            *own,
        ]

    def save(self, directory: Path) -> None:
        """Between steps, and after an interrupted `fill`: saves everything that the next `fill` depends on, except
        prompts and weights."""
        self.drain()
        episodes = self._episodes
        state = SamplerState(
            self._next_draw,
            self._acceptance,
            self._grading,
            self.carried,
            tuple(SavedFlight(flight) for flight in episodes.unfinished),
            self._paused,
            episodes.order,
            episodes.steps,
            self._restarted,
        )
        state.write(directory)

    def load(self, directory: Path) -> None:
        size = self._settings.group_size
        state = SamplerState.read(
            directory, self._prompts.find, self._episodes.request, size, self._longest, self._vocabulary
        )
        self._next_draw, self._acceptance, self._grading = state.next_draw, state.acceptance, state.grading
        self._paused, self._failed = state.interrupted, None
        self._admission = Admission(state.carried, state.interrupted.rejected if state.interrupted else ())
        self._episodes.drain()
        self._episodes.pause()
        self._episodes.remove(lambda flight: True)
        lost = self._episodes.restore(state.flights, state.order, state.steps)
        self._restarted = Restarted(*(a + b for a, b in zip(state.restarted, lost, strict=True)))

    def _top_up(self, batch: SampledBatch) -> None:
        """Starts as many groups as the recent acceptance rate says are needed, with those drawn ahead, and as pacing
        allows."""
        if self._settings.dynamic_batch:
            # The batch is drawn once, and again only if none of it can be trained on.
            wanted = batch.n if not len(self._episodes) and not batch.kept else 0
            for _ in range(min(wanted, self._cap - batch.drawn)):
                self._start(batch)
            return
        good = self._admission.good
        missing = batch.missing - good + self._settings.ahead * batch.n
        ahead = Ahead(len(batch.kept) + good)
        for flight in self._episodes:
            ahead.add(self._chance(flight.prompt))
        missing -= ahead.mean
        while missing > 1e-9 and batch.drawn < self._cap and may_start(self._settings, batch.n, ahead):
            chance = self._chance(self._start(batch))
            missing -= chance
            ahead.add(chance)

    def _due(self, first: int) -> int:
        """The last draw before `first`, the first of this step, that would be too old in the next step; -1 if there is
        none. As versions increase with draws, so would be all draws before it."""
        if self._settings.surplus != "carry":
            return -1
        begun = [(flight.draw, flight.version) for flight in self._episodes]
        begun += [(group.draw, group.first_version) for group in self.carried]
        oldest = self._engine.version - self._settings.max_staleness
        return max((draw for draw, version in begun if version <= oldest and draw < first), default=-1)

    def _chance(self, prompt: Prompt) -> float:
        """The probability that a group of this prompt is kept."""
        return self._acceptance.rate(prompt.data_source) if self._settings.dynamic else 1.0

    def _start(self, batch: SampledBatch) -> Prompt:
        batch.drawn += 1
        draw, self._next_draw = self._next_draw, self._next_draw + 1
        return self._episodes.start(draw, self._prompts.draw()).prompt

    def _advance(self, batch: SampledBatch) -> None:
        """Polls the engine, submits complete groups to the verifier, and reads the verdicts that are due."""
        started = time.perf_counter()
        try:
            batch.tokens_finished += self._episodes.poll(self._check)
        finally:
            batch.generate_seconds += time.perf_counter() - started
        self._judge_due(batch)

    def _judge_due(self, batch: SampledBatch) -> None:
        waits = self._settings.wait_for_verdicts or self._episodes.policy is not None
        self._judge(batch, everything=not self._episodes.generating or (waits and self._could_be_full(batch)))

    def _could_be_full(self, batch: SampledBatch) -> bool:
        """Whether the batch is full if all pending verdicts are good. The sampler then waits for them, because the next
        sample may take long to finish."""
        return self._admission.good + self._episodes.judging >= batch.missing

    def _judge(self, batch: SampledBatch, everything: bool) -> None:
        started = time.perf_counter()
        for group in self._episodes.finish(judge_all=everything, check=self._check):
            batch.sampled.append(group)  # before a filter that may raise
            graded = self._settings.dynamic and self._settings.metric == "auto" and not self._decoupled
            if graded and (note := self._grading.observe(group)):
                batch.notes.append(note)
            how = (self._grading, self._masking, self._decoupled)
            outcome = outcome_of(group, self._settings, self._keep, *how)
            self._acceptance.observe(group.prompt.data_source, outcome == "kept")
            self._tell_prompts(group, outcome)
            if outcome == "all_correct" and self._settings.skip_solved_epochs:
                self._prompts.skip(group.prompt, self._settings.skip_solved_epochs)
            self._admission.add(group, outcome)
        batch.verify_seconds += time.perf_counter() - started

    def _tell_prompts(self, group: Group, outcome: Outcome) -> None:
        if outcome in ("verifier_error", "environment_error"):
            return
        right = sum(verdict.correct for verdict in group.verdicts)
        # Without dynamic sampling, groups are kept whether they have a signal or not.
        has_signal = outcome == "kept" and (self._settings.dynamic or has_spread(group.verdicts, self._decoupled))
        self._prompts.observe(group.prompt, right, len(group.verdicts), has_signal)

    def _settle(self, batch: SampledBatch) -> None:
        """Ends a step: carries, requeues or drops what is left."""
        if self._during_updates:
            self._top_up(batch)
            self._engine.flush()
            self._admission.settle(batch, self._settings.surplus)
            return
        surplus = self._settings.surplus
        untouched = self._episodes.remove(lambda flight: flight.untouched)
        first = self._next_draw - batch.drawn  # what an earlier step drew has started again, after a restart
        batch.drawn -= sum(flight.draw >= first for flight in untouched)
        cancelled = self._episodes.remove(lambda flight: surplus != "carry")
        for flight in cancelled:
            # Its finished samples have already been counted as generated.
            batch.tokens_cancelled += flight.partial_tokens + flight.finished_tokens
            batch.tokens_finished -= flight.finished_tokens
        judged = self._admission.settle(batch, surplus)
        # Whether a surplus group has finished says how fast its prompt is, and must not decide whether it is drawn
        # again: for that reason rejected groups are, too.
        again = [(flight.draw, flight.prompt) for flight in untouched]
        if surplus == "requeue":
            again += [(flight.draw, flight.prompt) for flight in cancelled]
            again += [(group.draw, group.prompt) for group in judged]
        self._prompts.push_front([prompt for _, prompt in sorted(again, key=lambda entry: entry[0])])

    def _late_verdicts(self, batch: SampledBatch) -> str | None:
        """Tells once that the engine waits for verdicts, if it does so for a good part of a step."""
        waited, worked = batch.verify_seconds, batch.generate_seconds
        if self._episodes.policy is not None:  # the engine has worked for them
            return None
        if self._told_of_waiting or not self._settings.wait_for_verdicts or waited < max(LONG_WAIT_S, worked / 4):
            return None
        self._told_of_waiting = True
        whom, workers = ("environments", "env.workers") if self.has_environment else ("verdicts", "reward.workers")
        return (
            f"the engine waited {waited:.0f} s for {whom} and worked for {worked:.0f} s; raise {workers}, or set "
            "sampling.wait_for_verdicts=false, with which a seed no longer gives the same run"
        )

    def _check_failures(self, batch: SampledBatch) -> None:
        """Stops a run whose verifier or environment is broken, once a batch's worth of groups has been judged."""
        if len(batch.sampled) < self._settings.prompts_per_step:
            return
        if self._episodes.conversations is not None:
            pairs = [pair for group in batch.sampled for pair in group.judged]
            check_environment(pairs, self._episodes.conversations.max_error_share)
        check_verifier(batch.sampled, self._max_error_share)
