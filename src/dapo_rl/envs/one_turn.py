"""A verifier as an environment: the first turn is the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo_rl.types import Drops, Pending, Prompt, Trajectory, Verdict, Verifier


@dataclass(frozen=True, slots=True)
class AtHand:
    """Verdicts that need no waiting."""

    verdicts: Sequence[Verdict]

    def result(self) -> Sequence[Verdict]:
        return self.verdicts

    def done(self) -> bool:
        return True


class OneTurn:
    """Judges groups with a verifier; asynchronously, if it has a method `submit`."""

    def __init__(self, verifier: Verifier, drops: Drops | None = None) -> None:
        """`drops` says whether the group of these verdicts is dropped, whatever the scores of reward models."""
        self._verifier = verifier
        self._submit: Callable[..., Pending] | None = getattr(verifier, "submit", None)
        self._more = {"drops": drops} if getattr(verifier, "skips_dropped", False) else {}

    def step(self, prompt: Prompt, turns: Sequence[Trajectory]) -> Pending:
        if self._submit is not None:
            return self._submit(prompt, turns, **self._more)
        return AtHand(self._verifier(prompt, turns))
