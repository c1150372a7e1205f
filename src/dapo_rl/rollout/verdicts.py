"""Calls a verifier, asynchronously if it has a `submit` method, and waits for its verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass

from dapo_rl.errors import UserError
from dapo_rl.types import Pending, Prompt, Trajectory, Verdict, Verifier

STOP_LOOK_S = 0.25
"""Seconds between checks for a requested stop, while the engine or the verifier works."""


def check_nothing() -> None:
    """For callers that never stop early."""


@dataclass(frozen=True, slots=True)
class AtHand:
    """Verdicts that need no waiting."""

    verdicts: list[Verdict]

    def result(self) -> list[Verdict]:
        return self.verdicts

    def done(self) -> bool:
        return True


def submit(verifier: Verifier, prompt: Prompt, samples: Sequence[Trajectory]) -> Pending:
    its_own: Callable[[Prompt, Sequence[Trajectory]], Pending] | None = getattr(verifier, "submit", None)
    return AtHand(verifier(prompt, samples)) if its_own is None else its_own(prompt, samples)


def await_verdicts(pending: Pending, check: Callable[[], None] = check_nothing) -> list[Verdict]:
    """Waits for the verdicts. `check` is called meanwhile; it raises to end the waiting."""
    while isinstance(pending, Future) and not pending.done() and not wait([pending], STOP_LOOK_S).done:
        check()
    return pending.result()


def take_verdicts(pending: Sequence[Pending], timeout_s: float) -> list[tuple[Verdict, ...] | None]:
    """Waits at most this long for all of them. Those that are not ready are given up, and None in the result."""
    wait([each for each in pending if isinstance(each, Future)], timeout_s)
    return [_taken(each) for each in pending]


def _taken(pending: Pending) -> tuple[Verdict, ...] | None:
    if pending.done():
        with suppress(UserError):  # a verifier that cannot judge at all says so again
            return tuple(pending.result())
    elif isinstance(pending, Future):
        pending.cancel()
    return None
