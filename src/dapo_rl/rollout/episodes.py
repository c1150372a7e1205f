"""Episodes: the samples of a group from the draw of its prompt to their verdicts.

A group is with the engine until all its samples have ended a turn, and then with the environment, which answers each
turn with an observation, so that the sample continues with the engine, or with a verdict, which ends it. A verifier is
an environment whose episodes have one turn. The engine keeps generating while the environment works.

The answers of an environment are read a fixed number of engine polls after they were asked for, not when they happen to
be ready. Every decision then depends only on the order of draws, polls and weight versions, so the same seed gives the
same run. With `wait_for_verdicts: false` they are read as soon as they are ready, and the engine never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.envs import AtHand
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.types import Answer, Environment, Group, Pending, Prompt, Trajectory, Turn, Verdict

LEAST_POLLS = 4
POLLS_PER_TOKEN = 1 / 256
"""How many engine polls pass before an answer is waited for: long responses leave more time to compute it."""
GRACE_S = 2.0
"""Seconds that a paused batch waits for the answers that are being computed."""
STOP_LOOK_S, ANSWER_LOOK_S = 0.25, 0.25
"""Seconds between checks for a requested stop, while the engine or the environment works."""

Tokenize = Callable[[str], Sequence[int]]


def check_nothing() -> None:
    """For callers that never stop early."""


@dataclass(slots=True)
class InFlightGroup:
    """A group without all of its verdicts; its samples end their turns one by one."""

    draw: int
    prompt: Prompt
    version: int
    """The version of the weights it started with."""
    request: Request
    """The request last submitted to the engine; while the engine does not hold it, the remaining work."""
    samples: list[Trajectory | None]
    """Samples that have ended their turn."""
    verdicts: list[Verdict | None] = field(default_factory=list)
    """Of samples whose episode has ended before that of others; empty if there are none."""

    @property
    def finished_tokens(self) -> int:
        return sum(sample.written for sample in self.samples if sample is not None)

    def group(self, verdicts: tuple[Verdict, ...] = ()) -> Group:
        """Its finished samples."""
        return Group(self.draw, self.prompt, tuple(sample for sample in self.samples if sample is not None), verdicts)

    @property
    def is_whole(self) -> bool:
        """Whether all its samples have ended their turn."""
        return all(sample is not None for sample in self.samples)

    @property
    def waiting(self) -> list[int]:
        """The samples whose turns the environment answers."""
        return [i for i in range(len(self.samples)) if not self.verdicts or self.verdicts[i] is None]


@dataclass(frozen=True, slots=True)
class Step:
    """A group that is with the environment."""

    poll: int
    flight: InFlightGroup
    answers: Pending


@dataclass(frozen=True, slots=True)
class Unread:
    """A group of a paused batch that is with the environment."""

    flight: InFlightGroup
    polls: int
    """Engine polls since it was complete; enough of them if its answers are due."""
    verdicts: tuple[Verdict, ...] | None
    """None: they are computed again."""


class Episodes:
    """All groups without verdicts: those with the engine by request id, and those with the environment in the order in
    which they came there. Between steps the engine holds none of them, unless it samples during updates."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        request: Callable[[int, Prompt], Request],
        *,
        longest: int = 0,
        waits: bool = True,
        tokenize: Tokenize | None = None,
    ) -> None:
        """`request` returns the request for a draw of a prompt, always the same one; `longest` is the limit on new
        tokens. `tokenize` encodes what environments of several turns observe."""
        self._engine, self._environment, self.request, self._tokenize = engine, environment, request, tokenize
        self._waits, self._polls_to_wait = waits, max(LEAST_POLLS, int(longest * POLLS_PER_TOKEN))
        self._generating: dict[str, InFlightGroup] = {}
        self._stepping: list[Step] = []
        self._polls = 0
        self.submitted = False
        """Whether the engine holds the groups that generate."""

    def __len__(self) -> int:
        return len(self._generating) + len(self._stepping)

    def __iter__(self) -> Iterator[InFlightGroup]:
        yield from self._generating.values()
        yield from (step.flight for step in self._stepping)

    @property
    def generating(self) -> tuple[InFlightGroup, ...]:
        """The groups that are with the engine, or go there next."""
        return tuple(self._generating.values())

    @property
    def stepping(self) -> int:
        """How many groups are with the environment."""
        return len(self._stepping)

    # With the engine.

    def start(self, draw: int, prompt: Prompt) -> InFlightGroup:
        """Opens the episodes of a group."""
        request = self.request(draw, prompt)
        flight = InFlightGroup(draw, prompt, self._engine.version, request, [None] * request.count)
        self.add(flight)
        self._engine.submit(flight.request)
        return flight

    def add(self, flight: InFlightGroup) -> None:
        """Adds a group, for example from a checkpoint, without submitting it."""
        self._generating[flight.request.id] = flight

    def resume(self) -> None:
        """Submits the unfinished requests of the last step, or of a paused one, in the order in which the engine
        returned them, unless it still has them."""
        if not self.submitted:
            for flight in self._generating.values():
                self._engine.submit(flight.request)
        self.submitted = True

    def poll(self, timeout_s: float | None = None, check: Callable[[], None] = check_nothing) -> int:
        """Runs the engine until samples end their turns, and hands each group whose samples have all ended theirs to
        the environment. Returns the number of tokens of these samples. `check` is called every fraction of a second;
        it raises to stop waiting."""
        if timeout_s is None and self._generating:
            completions = poll_engine(self._engine, check)
        else:
            check()
            completions = self._engine.poll(timeout_s)
        if not completions and timeout_s is None and self._generating:
            raise RuntimeError(f"the engine returned nothing with {len(self._generating)} unfinished requests")
        whole, tokens = self._arrived(completions)
        self._hand_over(whole)
        return tokens

    def drain(self) -> int:
        """Takes all unfinished requests out of the engine, with their tokens. Samples may have finished since the last
        poll; returns their tokens."""
        if not self.submitted:
            return 0
        unfinished = {request.id: request for request in self._engine.take_unfinished()}
        whole, tokens = self._arrived(self._engine.poll(0.0))
        self.submitted = False
        if unfinished.keys() != self._generating.keys():
            lost = sorted(unfinished.keys() ^ self._generating.keys())
            raise RuntimeError(f"the engine did not return the requests it was given: {', '.join(lost[:3])}")
        flights, self._generating = self._generating, {}
        for name, request in unfinished.items():
            flights[name].request = request
            self._generating[name] = flights[name]
        if whole:
            self._hand_over(whole)
        return tokens

    def remove(self, unwanted: Callable[[InFlightGroup], bool]) -> list[InFlightGroup]:
        """Removes groups that generate and that the engine does not hold; returns them in the order drawn."""
        removed = [flight for flight in self._generating.values() if unwanted(flight)]
        for flight in removed:
            del self._generating[flight.request.id]
        return sorted(removed, key=lambda flight: flight.draw)

    def _arrived(self, completions: Sequence[Completion]) -> tuple[list[InFlightGroup], int]:
        whole: list[InFlightGroup] = []
        tokens = 0
        for completion in completions:
            flight = self._arrive(completion)
            tokens += completion.sample.written
            if flight.is_whole:
                whole.append(self._generating.pop(completion.request_id))
        return whole, tokens

    def _arrive(self, completion: Completion) -> InFlightGroup:
        flight = self._generating.get(completion.request_id)
        if flight is None or flight.samples[completion.index] is not None:
            raise RuntimeError(
                f"the engine returned sample {completion.index} of {completion.request_id}, which was not requested"
            )
        if not np.isfinite(completion.sample.logps).all():
            raise NonFiniteError("the engine sampled a token whose log-probability is not finite")
        flight.samples[completion.index] = completion.sample
        return flight

    # With the environment.

    def finish(self, *, everything: bool, check: Callable[[], None] = check_nothing) -> Iterator[Group]:
        """Waits for the answers that are due, and yields the groups whose episodes have all ended. The others continue
        with the engine.

        `check` is called meanwhile; it raises to end the waiting. What was due then stays due.
        """
        if everything:
            due = [replace(step, poll=self._polls - self._polls_to_wait) for step in self._stepping]
            self._stepping = list(due)
        else:
            due = [step for step in self._stepping if self._is_due(step)]
        for step in due:
            answers = await_answers(step.answers, check)
            self._stepping = [other for other in self._stepping if other is not step]
            if (group := self._answered(step.flight, answers)) is not None:
                yield group

    def pause(self) -> tuple[Unread, ...]:
        """Removes the groups that are with the environment, with the verdicts that are computed within a few
        seconds."""
        steps, self._stepping = self._stepping, []
        wait([step.answers for step in steps if isinstance(step.answers, Future)], GRACE_S)
        return tuple(
            Unread(step.flight, min(self._polls - step.poll, self._polls_to_wait), _verdicts_of(step.answers))
            for step in steps
        )

    def unpause(self, paused: Sequence[Unread]) -> None:
        """Adds the groups of a paused batch; verdicts that are missing are computed."""
        for unread in paused:
            self._step(unread.flight, self._polls - unread.polls, unread.verdicts)

    def _hand_over(self, whole: Sequence[InFlightGroup]) -> None:
        """Gives the groups that the last engine poll completed to the environment."""
        self._polls += 1
        for flight in whole:
            self._step(flight, self._polls)

    def _step(self, flight: InFlightGroup, poll: int, verdicts: Sequence[Verdict] | None = None) -> None:
        turns = [flight.samples[i] for i in flight.waiting]
        answers = AtHand(verdicts) if verdicts is not None else self._environment.step(flight.prompt, _known(turns))
        self._stepping.append(Step(poll, flight, answers))

    def _is_due(self, step: Step) -> bool:
        if not self._waits:
            return step.answers.done()
        return self._polls - step.poll >= self._polls_to_wait

    def _answered(self, flight: InFlightGroup, answers: Sequence[Answer]) -> Group | None:
        """The group, if all its episodes have ended."""
        verdicts = flight.verdicts or [None] * len(flight.samples)
        partial: list[Trajectory] = []
        for i, answer in zip(flight.waiting, answers, strict=True):
            if isinstance(answer, Verdict):
                verdicts[i] = answer
            else:
                partial.append(self._continued(flight.samples[i], i, answer.text))
                flight.samples[i] = None
        if not partial:
            return flight.group(tuple(verdict for verdict in verdicts if verdict is not None))
        flight.verdicts = verdicts
        flight.request = replace(flight.request, partial=tuple(partial), new=())
        self.add(flight)
        if self.submitted:
            self._engine.submit(flight.request)
        return None

    def _continued(self, turn: Trajectory | None, index: int, observed: str) -> Trajectory:
        assert turn is not None
        if turn.truncated or self._tokenize is None:
            raise UserError("the environment answered a sample that cannot continue; it has to end with a verdict")
        after = turn.then_observed(self._tokenize(observed))
        ends = (turn.turns[-1].end if turn.turns else 0, len(turn.token_ids), len(after.token_ids))
        turns = (*turn.turns, Turn(ends[0], ends[1], "policy"), Turn(ends[1], ends[2], "environment"))
        return after.replace(finish_reason=None, index=index, turns=turns)


def _known(turns: Sequence[Trajectory | None]) -> list[Trajectory]:
    return [turn for turn in turns if turn is not None]


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


def await_answers(pending: Pending, check: Callable[[], None] = check_nothing) -> Sequence[Answer]:
    """Waits for the answers. `check` is called meanwhile; it raises to end the waiting."""
    while isinstance(pending, Future) and not pending.done() and not wait([pending], ANSWER_LOOK_S).done:
        check()
    return pending.result()


def _verdicts_of(pending: Pending) -> tuple[Verdict, ...] | None:
    """The verdicts, if they are ready; otherwise they are given up."""
    if pending.done():
        with suppress(UserError):  # a verifier that cannot judge at all says so again
            verdicts = tuple(answer for answer in pending.result() if isinstance(answer, Verdict))
            return verdicts if len(verdicts) == len(pending.result()) else None
    elif isinstance(pending, Future):
        pending.cancel()
    return None
