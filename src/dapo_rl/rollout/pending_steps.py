"""What is with environments and verifiers, and when its answers are read.

Answers are read a fixed number of engine polls after they were asked for, not when they happen to be ready. Every
decision then depends only on the order of draws, polls and weight versions, so the same seed gives the same run. With
`wait_for_verdicts: false` they are read as soon as they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from dapo_rl.errors import StopRequested, UserError
from dapo_rl.rollout.conversation import Conversation
from dapo_rl.rollout.in_flight import InFlightGroup
from dapo_rl.types import Pending, Verdict

LEAST_POLLS = 4
POLLS_PER_TOKEN = 1 / 256
"""How many engine polls pass before an answer is waited for: long responses leave more time to compute it."""
ANSWER_LOOK_S = 0.25
"""Seconds between checks for a requested stop, while an environment or a verifier works."""


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


class PendingSteps:
    """The steps that have been asked for and whose answers have not been read."""

    def __init__(self, longest: int, waits: bool) -> None:
        """`longest` is the limit on new tokens. Without `waits`, answers are read as soon as they are ready."""
        self.polls = 0
        """How often the engine was polled."""
        self.polls_to_wait = max(LEAST_POLLS, int(longest * POLLS_PER_TOKEN))
        self.environments: dict[int, Step] = {}
        """What is with the environment, by number, in the order asked for."""
        self.verdicts: dict[int, Step] = {}
        """What is with the verifier."""
        self.waits = waits
        self._ready: set[int] = set()
        """Without `waits`: the steps that may have been answered."""
        self._news: SimpleQueue[int] = SimpleQueue()
        """The same since the last look, by any thread."""

    def __len__(self) -> int:
        return len(self.environments) + len(self.verdicts)

    def add(self, step: Step) -> None:
        (self.verdicts if step.judges else self.environments)[step.number] = step
        if self.waits:
            return
        news, number, futures = self._news, step.number, futures_of(step.answers)
        for future in futures:
            future.add_done_callback(lambda _: news.put(number))
        if not futures:
            news.put(number)

    def age(self, step: Step) -> int:
        """The polls since it was asked for, as far as they count."""
        return min(self.polls - step.poll, self.polls_to_wait)

    def make_verdicts_due(self) -> None:
        """All of them, from now on."""
        first = self.polls - self.polls_to_wait
        self.verdicts = {number: replace(step, poll=first) for number, step in self.verdicts.items()}

    def due(self, steps: Mapping[int, Step]) -> list[Step]:
        """The steps whose answers are to be read, in the order asked for."""
        if not self.waits:
            return self._answered(steps)
        return [step for step in steps.values() if self.polls - step.poll >= self.polls_to_wait]

    def first(self, check: Callable[[], None]) -> list[Step]:
        """The steps with environments that come first: in the order asked for, or of time."""
        if self.waits:
            first = min((step.poll for step in self.environments.values()), default=0)
            return [step for step in self.environments.values() if step.poll == first]
        while self.environments:
            if answered := self._answered(self.environments):
                return answered
            if self._answered(self.verdicts):
                break  # the caller has work
            with suppress(Empty):
                self._ready.add(self._news.get(timeout=ANSWER_LOOK_S))
            check()
        return []

    def _answered(self, steps: Mapping[int, Step]) -> list[Step]:
        """Without `waits`, those that have been answered and not been read yet, in the order asked for."""
        with suppress(Empty):
            while True:
                self._ready.add(self._news.get_nowait())
        answered = []
        for number in sorted(self._ready):
            step = self.environments.get(number) or self.verdicts.get(number)
            if step is None or (futures_of(step.answers) and not step.answers.done()):
                self._ready.discard(number)
            elif number in steps and step.answers.done():
                answered.append(step)
        return answered


def futures_of(pending: Pending) -> Sequence[Future[Any]]:
    return [pending] if isinstance(pending, Future) else getattr(pending, "futures", ())


def await_answers(pending: Pending, check: Callable[[], None] = check_nothing) -> Sequence[Any]:
    """Waits for the answers. `check` is called meanwhile; it raises to end the waiting."""
    futures = futures_of(pending)
    while futures and not pending.done():
        if not wait(futures, ANSWER_LOOK_S).not_done:
            break
        check()
    return pending.result()


def verdicts_of(pending: Pending) -> tuple[Verdict, ...] | None:
    """The verdicts, if they are ready; otherwise they are given up."""
    if pending.done():
        with suppress(UserError, StopRequested, CancelledError):  # a verifier that cannot judge at all says so again
            return tuple(pending.result())
    else:
        for future in futures_of(pending):
            future.cancel()
    return None
