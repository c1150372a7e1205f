"""Calls a verifier, asynchronously if it has a `submit` method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dapo_rl.types import Pending, Prompt, Sample, Verdict, Verifier


@dataclass(frozen=True, slots=True)
class _AtHand:
    verdicts: list[Verdict]

    def result(self) -> list[Verdict]:
        return self.verdicts

    def done(self) -> bool:
        return True


def submit(verifier: Verifier, prompt: Prompt, samples: Sequence[Sample]) -> Pending:
    its_own: Callable[[Prompt, Sequence[Sample]], Pending] | None = getattr(verifier, "submit", None)
    return _AtHand(verifier(prompt, samples)) if its_own is None else its_own(prompt, samples)
