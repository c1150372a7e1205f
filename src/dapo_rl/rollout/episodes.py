"""Groups in flight: episodes from the draw of their prompt to their verdicts.

An episode is with the engine, which writes a turn, or with its environment, which answers it, until the environment or
a limit ends it. Each episode moves on its own: while one waits for a tool, the engine writes the turns of others. When
all episodes of a group have ended, the verifier judges them. Without an environment, an episode is one turn.

Answers and verdicts are read a fixed number of engine polls after they were asked for, not when they happen to be
ready. Every decision then depends only on the order of draws, polls and weight versions, so the same seed gives the
same run. With `wait_for_verdicts: false` they are read as soon as they are ready, and the engine never waits for one.
Verdicts of a judge that is the policy itself need the engine: they are read only when the caller asks for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.envs import AtHand, OneTurn
from dapo_rl.errors import NonFiniteError, StopRequested, UserError
from dapo_rl.rewards.judge.policy import JudgingPolicy
from dapo_rl.rollout.conversation import Conversation, Conversations
from dapo_rl.rollout.in_flight import InFlightGroup, Unread
from dapo_rl.rollout.lost_episodes import replay_lost
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight, SavedStep
from dapo_rl.types import Group, Pending, Prompt, RewardPart, Verdict

LEAST_POLLS = 4
POLLS_PER_TOKEN = 1 / 256
"""How many engine polls pass before an answer is waited for: long responses leave more time to compute it."""
GRACE_S = 2.0
"""Seconds that a paused batch waits for the verdicts that are being computed."""
STOP_LOOK_S, ANSWER_LOOK_S = 0.25, 0.25
"""Seconds between checks for a requested stop, while the engine or the environment works."""


def check_nothing() -> None:
    """For callers that never stop early."""


@dataclass(frozen=True, slots=True)
class Step:
    """A group that is with the verifier, or an episode that is with its environment."""

    poll: int
    flight: InFlightGroup
    answers: Pending
    conversation: Conversation | None = None
    opens: bool = False
    """Whether the environments of the group are being opened."""
    number: int = field(default_factory=count().__next__)
    """Counts the steps in the order in which they were asked for."""

    @property
    def judges(self) -> bool:
        return self.conversation is None and not self.opens


@dataclass(frozen=True, slots=True)
class AllOf:
    """Answers to several calls."""

    futures: Sequence[Future[Any]]

    def result(self) -> Sequence[Any]:
        return [future.result() for future in self.futures]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)


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
        self._waits, self._polls_to_wait = waits, max(LEAST_POLLS, int(longest * POLLS_PER_TOKEN))
        self._generating: dict[str, InFlightGroup] = {}
        self._stepping: dict[int, Step] = {}
        """What is with the environment, by number, in the order asked for."""
        self._judging: dict[int, Step] = {}
        """What is with the verifier."""
        self._held: dict[int, InFlightGroup] = {}
        """All groups, by their draws."""
        self._ready: set[int] = set()
        """Without `waits`: the steps that may have been answered."""
        self._news: SimpleQueue[int] = SimpleQueue()
        """The same since the last look, by any thread."""
        self._polls = 0
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
        flights = [*self._generating.values(), *(step.flight for step in self._stepping.values())]
        return tuple({id(flight): flight for flight in flights}.values())

    @property
    def stepping(self) -> int:
        """How many groups and episodes are with the verifier or their environment."""
        return len(self._stepping) + len(self._judging)

    @property
    def judging(self) -> int:
        """How many groups are with the verifier."""
        return len(self._judging)

    # With the engine.

    def start(self, draw: int, prompt: Prompt) -> InFlightGroup:
        """Opens the episodes of a group."""
        version = self._engine.version
        request = self.request(draw, prompt, version)
        flight = self._held[draw] = InFlightGroup(draw, prompt, version, request, [None] * request.count)
        if self.conversations is None:
            self.add(flight)
            self._engine.submit(flight.request)
        else:
            flight.conversations = self.conversations.new(request)
            self._open(flight)
        return flight

    def add(self, flight: InFlightGroup) -> None:
        """Adds a group, for example from a checkpoint, without submitting it."""
        self._held[flight.draw] = flight
        for name in flight.turns if flight.conversations else (flight.request.id,):
            self._generating[name] = flight

    def resume(self) -> None:
        """Submits the unfinished requests of the last step, or of a paused one, in the order in which the engine
        returned them, unless it still has them."""
        if not self.submitted:
            for name, flight in self._generating.items():
                self._engine.submit(flight.turns[name] if flight.conversations else flight.request)
        self.submitted = True

    def poll(self, timeout_s: float | None = None, check: Callable[[], None] = check_nothing) -> int:
        """Runs the engine until samples end their turns, and hands them on. Returns the number of tokens of these
        turns. `check` is called every fraction of a second; it raises to stop waiting."""
        if timeout_s is None and self._generating:
            completions = poll_engine(self._engine, check)
        else:
            check()
            completions = self._engine.poll(timeout_s)
        if not completions and timeout_s is None and self._generating:
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
        polls, steps = self._polls, self.stepping
        tokens = self._arrived(completions)
        if self.stepping == steps:
            self._polls = polls  # nothing waits for this poll
        if unfinished.keys() != self._generating.keys():
            lost = sorted(unfinished.keys() ^ self._generating.keys())
            raise RuntimeError(f"the engine did not return the requests it was given: {', '.join(lost[:3])}")
        flights, self._generating = self._generating, {}
        for name, request in unfinished.items():
            flight = self._generating[name] = flights[name]
            if flight.conversations:
                flight.turns[name] = request
            else:
                flight.request = request
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
        self._stepping = {n: step for n, step in self._stepping.items() if id(step.flight) not in removed}
        for flight in removed.values():
            del self._held[flight.draw]
        if self.conversations is not None:
            for flight in removed.values():
                self.conversations.close(flight.conversations)
        return sorted(removed.values(), key=lambda flight: flight.draw)

    def _arrived(self, completions: Sequence[Completion]) -> int:
        """Hands samples that have ended their turns on. Returns the tokens of these turns."""
        self._polls += 1
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
                flight.turns.pop(completion.request_id, None)
            if flight.conversations:
                tokens += self._end_turn(flight, completion)
            else:
                tokens += completion.sample.written
                if flight.is_whole:
                    self._ask_judge(flight, self._polls)
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
            by_name |= dict.fromkeys(flight.turns if flight.conversations else (flight.request.id,), flight)
        for name in [*(name for name in order if name in by_name), *(name for name in by_name if name not in order)]:
            self._generating[name] = by_name[name]
        flights = {each.flight.draw: each.flight for each in saved}
        self._held |= flights
        for step in steps:
            flight, poll = flights[step.draw], self._polls - step.polls
            if step.index is None:
                self._open(flight, poll)
            elif (answer := pending.get((step.draw, step.index))) is not None:
                conversation = flight.conversations[step.index]
                self._add(Step(poll, flight, AllOf([answer]), conversation))
        for flight in flights.values():
            if flight.is_whole:  # no environment could be opened again
                self._ask_judge(flight, self._polls)
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
                step.flight.draw,
                None if step.conversation is None else step.conversation.index,
                min(self._polls - step.poll, self._polls_to_wait),
            )
            for step in self._stepping.values()
        )

    # With the environment.

    def _open(self, flight: InFlightGroup, poll: int | None = None) -> None:
        assert self.conversations is not None
        opening = [self.conversations.open(conversation, flight.prompt) for conversation in flight.conversations]
        self._add(Step(self._polls if poll is None else poll, flight, AllOf(opening), opens=True))

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
            self._add(Step(self._polls, flight, AllOf([answer]), conversation))

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
            self._ask_judge(flight, self._polls)

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
        self._add(Step(poll, flight, answers))

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
            first = self._polls - self._polls_to_wait
            self._judging = {number: replace(step, poll=first) for number, step in self._judging.items()}
        yield from self._finish(self._to_read(judge_all), check)
        self._take_answers(self._due(self._stepping), check)
        if judge_all:  # those answers may have ended groups
            yield from self._finish(tuple(self._judging.values()), check)
        while self.submitted and not self._generating and (first_steps := self._first_answers(check)):
            self._take_answers(first_steps, check)
            if self._judging:
                yield from self._finish(tuple(self._judging.values()), check)
                break  # the caller may have had enough

    def _to_read(self, judge_all: bool) -> Sequence[Step]:
        """The groups whose verdicts are read now. Those that the policy gives are all read together."""
        if judge_all:
            return tuple(self._judging.values())
        return self._due(self._judging) if self.policy is None else ()

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
            del self._judging[step.number], self._held[step.flight.draw]
            yield self._judged(step.flight, verdicts)

    def _take_answers(self, due: Sequence[Step], check: Callable[[], None]) -> None:
        answers = [await_answers(step.answers, check) for step in due]
        if self.conversations is not None:
            answers = replay_lost(self.conversations, due, answers)
        for step, results in zip(due, answers, strict=True):
            del self._stepping[step.number]
            self._answered(step, results)

    def _due(self, steps: Mapping[int, Step]) -> list[Step]:
        """The steps whose answers are to be read, in the order asked for."""
        if not self._waits:
            return self._answered_steps(steps)
        return [step for step in steps.values() if self._polls - step.poll >= self._polls_to_wait]

    def _first_answers(self, check: Callable[[], None]) -> list[Step]:
        """The steps with environments that come first: in the order asked for, or of time."""
        if self._waits:
            first = min((step.poll for step in self._stepping.values()), default=0)
            return [step for step in self._stepping.values() if step.poll == first]
        while self._stepping:
            if answered := self._answered_steps(self._stepping):
                return answered
            if self._answered_steps(self._judging):
                break  # the caller has work
            with suppress(Empty):
                self._ready.add(self._news.get(timeout=ANSWER_LOOK_S))
            check()
        return []

    def _answered_steps(self, steps: Mapping[int, Step]) -> list[Step]:
        """Without `waits`, those that have been answered and not been read yet, in the order asked for."""
        with suppress(Empty):
            while True:
                self._ready.add(self._news.get_nowait())
        answered = []
        for number in sorted(self._ready):
            step = self._stepping.get(number) or self._judging.get(number)
            if step is None or (_futures(step.answers) and not step.answers.done()):
                self._ready.discard(number)
            elif number in steps and step.answers.done():
                answered.append(step)
        return answered

    def _add(self, step: Step) -> None:
        (self._judging if step.judges else self._stepping)[step.number] = step
        if self._waits:
            return
        news, number, futures = self._news, step.number, _futures(step.answers)
        for future in futures:
            future.add_done_callback(lambda _: news.put(number))
        if not futures:
            news.put(number)

    def pause(self) -> tuple[Unread, ...]:
        """Removes the groups that are with the verifier, with the verdicts that are computed within a few seconds.
        Those with environments stay."""
        if self.policy is not None:
            self.policy.forget()
        steps, self._judging = tuple(self._judging.values()), {}
        for step in steps:
            del self._held[step.flight.draw]
        wait([future for step in steps for future in _futures(step.answers)], GRACE_S)
        return tuple(
            Unread(step.flight, min(self._polls - step.poll, self._polls_to_wait), _verdicts_of(step.answers))
            for step in steps
        )

    def unpause(self, paused: Sequence[Unread]) -> None:
        """Adds the groups of a paused batch; verdicts that are missing are computed."""
        for unread in paused:
            self._ask_judge(unread.flight, self._polls - unread.polls, unread.verdicts)


def _both(mine: Verdict, other: Verdict, weight: float | None) -> Verdict:
    """A verdict of an environment (`mine`) and of a verifier; with no weight the environment gives no rewards."""
    if mine.failed:
        return mine
    if other.failed or weight is None:
        return other
    parts = other.parts or (RewardPart("verifier", other.score),)
    score = other.score + weight * mine.score
    return replace(other, score=score, parts=(*parts, RewardPart("environment", mine.score, weight)))


def _futures(pending: Pending) -> Sequence[Future[Any]]:
    return [pending] if isinstance(pending, Future) else getattr(pending, "futures", ())


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


def await_answers(pending: Pending, check: Callable[[], None] = check_nothing) -> Sequence[Any]:
    """Waits for the answers. `check` is called meanwhile; it raises to end the waiting."""
    futures = _futures(pending)
    while futures and not pending.done():
        if not wait(futures, ANSWER_LOOK_S).not_done:
            break
        check()
    return pending.result()


def _verdicts_of(pending: Pending) -> tuple[Verdict, ...] | None:
    """The verdicts, if they are ready; otherwise they are given up."""
    if pending.done():
        with suppress(UserError, StopRequested, CancelledError):  # a verifier that cannot judge at all says so again
            return tuple(pending.result())
    else:
        for future in _futures(pending):
            future.cancel()
    return None
