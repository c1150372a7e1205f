"""Groups in flight: episodes from the draw of their prompt to their verdicts.

An episode is with the engine, which writes a turn, or with its environment, which answers it, until the environment or
a limit ends it. Each episode moves on its own: while one waits for a tool, the engine writes the turns of others. When
all episodes of a group have ended, the verifier judges them. Without an environment, an episode is one turn.

Verdicts of a judge that is the policy itself need the engine: they are read only when the caller asks for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.envs import AtHand, OneTurn
from dapo_rl.errors import NonFiniteError
from dapo_rl.rewards.judge.policy import JudgingPolicy
from dapo_rl.rollout.conversation import Conversation, Conversations
from dapo_rl.rollout.in_flight import InFlightGroup, Unread
from dapo_rl.rollout.lost_episodes import replay_lost
from dapo_rl.rollout.pending_steps import (
    AllOf,
    PendingSteps,
    Step,
    await_answers,
    check_nothing,
    futures_of,
    verdicts_of,
)
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight, SavedStep
from dapo_rl.types import Group, Pending, Prompt, RewardPart, Verdict

GRACE_S = 2.0
"""Seconds that a paused batch waits for the verdicts that are being computed."""
LOOK_S = 0.05
"""Seconds between checks for answers that are read as soon as they are ready."""
STOP_LOOK_S = 0.25
"""Seconds between checks for a requested stop, while the engine works."""


class Episodes:
    """All groups without verdicts. Between steps the engine holds none of them, unless it samples during updates."""

    def __init__(
        self,
        engine: Engine,
        judge: OneTurn | None,
        request: Callable[[int, Prompt, int], Request],
        *,
        longest: int = 0,
        waits: bool = True,
        conversations: Conversations | None = None,
        policy: JudgingPolicy | None = None,
    ) -> None:
        """`judge` gives the verdicts; None: the environment does. `request` returns the request for a draw of a prompt,
        always the same one; `longest` is the limit on new tokens. `conversations` are with the environment; None: an
        episode is one turn. `policy` answers its questions with the engine."""
        self._engine, self._judge, self.request, self.conversations = engine, judge, request, conversations
        self.policy = policy
        self._pending = PendingSteps(longest, waits)
        self._generating: dict[str, InFlightGroup] = {}
        self._held: dict[int, InFlightGroup] = {}
        """All groups, by their draws."""
        self._uncounted = 0
        """Tokens of turns that ended when the engine was taken for judges."""
        self.submitted = False
        """Whether the engine holds the groups that generate."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[InFlightGroup]:
        """Every group, in the order drawn."""
        return iter(sorted(self._held.values(), key=lambda flight: flight.draw))

    @property
    def generating(self) -> bool:
        """Whether there is work for the engine."""
        return bool(self._generating)

    @property
    def unfinished(self) -> tuple[InFlightGroup, ...]:
        """The groups whose episodes have not all ended, those that are with the engine first, in the order in which it
        has them."""
        flights = [*self._generating.values(), *(step.flight for step in self._pending.environments.values())]
        return tuple({id(flight): flight for flight in flights}.values())

    @property
    def stepping(self) -> int:
        """How many groups and episodes are with the verifier or their environment."""
        return len(self._pending)

    @property
    def judging(self) -> int:
        """How many groups are with the verifier."""
        return len(self._pending.verdicts)

    # With the engine.

    def start(self, draw: int, prompt: Prompt) -> InFlightGroup:
        """Opens the episodes of a group."""
        version = self._engine.version
        request = self.request(draw, prompt, version)
        flight = self._held[draw] = InFlightGroup(draw, prompt, version, request, [None] * request.count)
        if self.conversations is None:
            self._submit(flight, request)
        else:
            flight.conversations = self.conversations.new(request)
            self._open(flight)
        return flight

    def resume(self) -> None:
        """Submits the unfinished requests of the last step, or of a paused one, in the order in which the engine
        returned them, unless it still has them."""
        if not self.submitted:
            for name, flight in self._generating.items():
                self._engine.submit(flight.turns[name])
        self.submitted = True

    def poll(self, check: Callable[[], None] = check_nothing) -> int:
        """Runs the engine until samples end their turns, and hands them on; for a moment only if answers are read as
        soon as they are ready. Returns the number of tokens of these turns. `check` is called every fraction of a
        second; it raises to stop waiting."""
        looks = self.stepping and not self._pending.waits
        if looks or not self._generating:
            check()
            completions = self._engine.poll(LOOK_S if looks else None)
        elif not (completions := poll_engine(self._engine, check)):
            raise RuntimeError(f"the engine returned nothing with {len(self._generating)} unfinished requests")
        return self._arrived(completions) + self._take_uncounted()

    def drain(self) -> int:
        """Takes all unfinished requests out of the engine, with their tokens. Samples may have finished since the last
        poll; returns their tokens."""
        if not self.submitted:
            return self._take_uncounted()
        unfinished = {request.id: request for request in self._engine.take_unfinished()}
        completions = self._engine.poll(0.0)
        self.submitted = False
        polls, steps = self._pending.polls, self.stepping
        tokens = self._arrived(completions)
        if self.stepping == steps:
            self._pending.polls = polls  # nothing waits for this poll
        if unfinished.keys() != self._generating.keys():
            lost = sorted(unfinished.keys() ^ self._generating.keys())
            raise RuntimeError(f"the engine did not return the requests it was given: {', '.join(lost[:3])}")
        flights, self._generating = self._generating, {}
        for name, request in unfinished.items():
            self._generating[name] = flights[name]
            flights[name].turns[name] = request
        return tokens + self._take_uncounted()

    def _take_uncounted(self) -> int:
        tokens, self._uncounted = self._uncounted, 0
        return tokens

    def abandon(self) -> None:
        """Leaves no work with the engine."""
        self._engine.cancel(self.order)
        self.remove(lambda flight: True)
        if self.policy is not None:
            self.policy.forget()

    def remove(self, unwanted: Callable[[InFlightGroup], bool]) -> list[InFlightGroup]:
        """Removes groups whose episodes have not all ended and that the engine does not hold; returns them in the order
        drawn."""
        removed = {id(flight): flight for flight in self.unfinished if unwanted(flight)}
        self._generating = {name: flight for name, flight in self._generating.items() if id(flight) not in removed}
        self._pending.environments = {
            n: step for n, step in self._pending.environments.items() if id(step.flight) not in removed
        }
        for flight in removed.values():
            del self._held[flight.draw]
            if self.conversations is not None:
                self.conversations.close(flight.conversations)
        return sorted(removed.values(), key=lambda flight: flight.draw)

    def _arrived(self, completions: Sequence[Completion]) -> int:
        """Hands samples that have ended their turns on. Returns the tokens of these turns."""
        self._pending.polls += 1
        tokens = 0
        for completion in completions:
            flight = self._generating.get(completion.request_id)
            if flight is None:
                name, index = completion.request_id, completion.index
                raise RuntimeError(f"the engine returned sample {index} of {name}, which was not requested")
            if not np.isfinite(completion.sample.logps).all():
                raise NonFiniteError("the engine sampled a token whose log-probability is not finite")
            if flight.arrive(completion):
                del self._generating[completion.request_id]
            if flight.conversations:
                tokens += self._end_turn(flight, completion)
            else:
                tokens += completion.sample.written
                if flight.is_whole:
                    self._ask_judge(flight, self._pending.polls)
        return tokens

    def restore(self, saved: Sequence[SavedFlight], order: Sequence[str], steps: Sequence[SavedStep]) -> Restarted:
        """Adds the groups of a checkpoint: requests in the order in which they are resubmitted, and steps in that in
        which they were asked for. Environments are brought back to where they were; where that is not possible, the
        episode starts again. Returns the number of tokens lost by that."""
        by_name: dict[str, InFlightGroup] = {}
        pending: dict[tuple[int, int], Future[Any] | None] = {}
        finished = partial = 0
        for each in saved:
            flight = each.flight
            if flight.conversations:
                assert self.conversations is not None
                for conversation in flight.conversations:  # names of an earlier load may still be closing
                    conversation.key = self.conversations.pool.new_key()
                lost = each.replay(self.conversations, pending)
                finished, partial = finished + lost.finished, partial + lost.partial
            by_name |= dict.fromkeys(flight.turns, flight)
        for name in [*(name for name in order if name in by_name), *(name for name in by_name if name not in order)]:
            self._generating[name] = by_name[name]
        flights = {each.flight.draw: each.flight for each in saved}
        self._held |= flights
        for step in steps:
            flight, poll = flights[step.draw], self._pending.polls - step.polls
            if step.index is None:
                self._open(flight, poll)
            elif (answer := pending.get((step.draw, step.index))) is not None:
                conversation = flight.conversations[step.index]
                self._pending.add(Step(poll, flight, AllOf([answer]), conversation))
        for flight in flights.values():
            if flight.is_whole:  # no environment could be opened again
                self._ask_judge(flight, self._pending.polls)
        return Restarted(finished, partial)

    @property
    def order(self) -> tuple[str, ...]:
        """The requests in the order in which they are submitted again."""
        return tuple(self._generating)

    @property
    def steps(self) -> tuple[SavedStep, ...]:
        """The episodes that are with their environments, in the order in which they came there."""
        return tuple(
            SavedStep(
                draw=step.flight.draw,
                index=None if step.conversation is None else step.conversation.index,
                polls=self._pending.age(step),
            )
            for step in self._pending.environments.values()
        )

    # With the environment.

    def _open(self, flight: InFlightGroup, poll: int | None = None) -> None:
        assert self.conversations is not None
        opening = [self.conversations.open(conversation, flight.prompt) for conversation in flight.conversations]
        self._pending.add(Step(self._pending.polls if poll is None else poll, flight, AllOf(opening), opens=True))

    def _opened(self, flight: InFlightGroup, results: Sequence[Any]) -> None:
        """Requests the first turns: at once, if the conversations begin alike."""
        assert self.conversations is not None
        for conversation, result in zip(flight.conversations, results, strict=True):
            self.conversations.opened(conversation, result)
        begun = [conversation for conversation in flight.conversations if conversation.verdict is None]
        requests = [self.conversations.request(conversation, flight.request) for conversation in begun]
        prompts = {request.prompt_ids.tobytes() for request in requests}
        if len(prompts) == 1:
            new = tuple(conversation.index for conversation in begun)
            requests = [replace(requests[0], id=flight.request.id, new=new)]
        for request in requests:
            self._submit(flight, request)
        self._end_episodes(flight, [c for c in flight.conversations if c.verdict is not None])

    def _submit(self, flight: InFlightGroup, request: Request) -> None:
        flight.turns[request.id] = request
        self._generating[request.id] = flight
        if self.submitted:
            self._engine.submit(request)

    def _end_turn(self, flight: InFlightGroup, completion: Completion) -> int:
        """Hands a turn to its environment. Returns its tokens."""
        assert self.conversations is not None
        conversation = flight.conversations[completion.index]
        before = conversation.trajectory.written
        answer = self.conversations.end_turn(conversation, completion.sample)
        self._wait_for(flight, conversation, answer)
        return completion.sample.written - before

    def _wait_for(self, flight: InFlightGroup, conversation: Conversation, answer: Future[Any] | None) -> None:
        """An answer of the environment; None: there is none, and the conversation has ended."""
        if answer is None:
            self._end_episodes(flight, [conversation])
        else:
            self._pending.add(Step(self._pending.polls, flight, AllOf([answer]), conversation))

    def _answered(self, step: Step, results: Sequence[Any]) -> None:
        """Takes an answer of the environment; the episode goes on with the engine, or ends."""
        assert self.conversations is not None
        flight, conversation = step.flight, step.conversation
        if conversation is None:
            self._opened(flight, results)
            return
        last = self.conversations.answer(conversation, results[0])
        if last is not None or conversation.verdict is not None:
            self._wait_for(flight, conversation, last)
        else:
            self._submit(flight, self.conversations.request(conversation, flight.request))

    def _end_episodes(self, flight: InFlightGroup, ended: Sequence[Conversation]) -> None:
        for conversation in ended:
            flight.samples[conversation.index] = conversation.trajectory
        if ended and flight.is_whole:
            self._ask_judge(flight, self._pending.polls)

    # With the verifier.

    def _ask_judge(self, flight: InFlightGroup, poll: int, verdicts: Sequence[Verdict] | None = None) -> None:
        samples = [sample for sample in flight.samples if sample is not None]
        if verdicts is not None:
            answers: Pending = AtHand(verdicts)
        elif self._judge is None:
            answers = AtHand([c.verdict for c in flight.conversations if c.verdict is not None])
        else:
            answers = self._judge.step(flight.prompt, samples)
        self._held[flight.draw] = flight
        self._pending.add(Step(poll, flight, answers))

    def _judged(self, flight: InFlightGroup, verdicts: Sequence[Verdict]) -> Group:
        if self.conversations is None or self._judge is None:
            return flight.group(tuple(verdicts))
        own = [conversation.verdict for conversation in flight.conversations]
        weight = self.conversations.reward_weight if self.conversations.rewards else None
        pairs = zip(own, verdicts, strict=True)
        return flight.group(tuple(verdict if mine is None else _both(mine, verdict, weight) for mine, verdict in pairs))

    def finish(self, *, judge_all: bool, check: Callable[[], None] = check_nothing) -> Iterator[Group]:
        """Waits for the verdicts that are due, with `judge_all` for all, and yields their groups. Waits for the answers
        of environments that are due; if the engine has no work, for the first ones."""
        if judge_all:  # what is due now stays due if `check` raises
            self._pending.make_verdicts_due()
        yield from self._finish(self._to_read(judge_all), check)
        self._take_answers(self._pending.due(self._pending.environments), check)
        if judge_all:  # those answers may have ended groups
            yield from self._finish(self._to_read(judge_all), check)
        while self.submitted and not self._generating and (first_steps := self._pending.first(check)):
            self._take_answers(first_steps, check)
            if self._pending.verdicts:
                yield from self._finish(self._to_read(judge_all=True), check)
                break  # the caller may have had enough

    def _to_read(self, judge_all: bool) -> Sequence[Step]:
        """The groups whose verdicts are read now. Those that the policy gives are all read together, in the order
        drawn: which of them several engines have finished first depends on the clock."""
        if self.policy is not None:
            return sorted(self._pending.verdicts.values(), key=lambda step: step.flight.draw) if judge_all else ()
        return tuple(self._pending.verdicts.values()) if judge_all else self._pending.due(self._pending.verdicts)

    def _ask_policy(self, check: Callable[[], None]) -> None:
        """Takes all samples out of the engine for as long as judges need it."""
        if self.policy is None or not self.policy.has_questions:
            return
        held = self.submitted
        self._uncounted = self.drain()  # with those of before
        self.policy.answer(check)
        if held:
            self.resume()

    def _finish(self, due: Sequence[Step], check: Callable[[], None]) -> Iterator[Group]:
        if due:
            self._ask_policy(check)
        for step in due:
            verdicts = await_answers(step.answers, check)
            del self._pending.verdicts[step.number], self._held[step.flight.draw]
            yield self._judged(step.flight, verdicts)

    def _take_answers(self, due: Sequence[Step], check: Callable[[], None]) -> None:
        answers = [await_answers(step.answers, check) for step in due]
        if self.conversations is not None:
            answers = replay_lost(self.conversations, due, answers)
        for step, results in zip(due, answers, strict=True):
            del self._pending.environments[step.number]
            self._answered(step, results)

    def pause(self) -> tuple[Unread, ...]:
        """Removes the groups that are with the verifier, with the verdicts that are computed within a few seconds.
        Those with environments stay."""
        if self.policy is not None:
            self.policy.forget()
        steps, self._pending.verdicts = tuple(self._pending.verdicts.values()), {}
        for step in steps:
            del self._held[step.flight.draw]
        wait([future for step in steps for future in futures_of(step.answers)], GRACE_S)
        return tuple(Unread(step.flight, self._pending.age(step), verdicts_of(step.answers)) for step in steps)

    def unpause(self, paused: Sequence[Unread]) -> None:
        """Adds the groups of a paused batch; verdicts that are missing are computed."""
        for unread in paused:
            self._ask_judge(unread.flight, self._pending.polls - unread.polls, unread.verdicts)


def _both(mine: Verdict, other: Verdict, weight: float | None) -> Verdict:
    """A verdict of an environment (`mine`) and of a verifier; with no weight the environment gives no rewards."""
    if mine.failed:
        return mine
    if other.failed or weight is None:
        return other
    parts = other.parts or (RewardPart("verifier", other.score),)
    score = other.score + weight * mine.score
    return replace(other, score=score, parts=(*parts, RewardPart("environment", mine.score, weight)))


def poll_engine(engine: Engine, check: Callable[[], None] = check_nothing) -> list[Completion]:
    """Runs the engine until samples finish. `check` is called every fraction of a second; it raises to end this.

    Only an engine that has no work returns nothing.
    """
    while True:
        check()
        started = monotonic()
        if completions := engine.poll(STOP_LOOK_S):
            return completions
        if monotonic() - started < STOP_LOOK_S / 2:  # it did not use its time: it has no work, or looks too early
            return engine.poll()
