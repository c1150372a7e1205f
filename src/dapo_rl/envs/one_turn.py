"""A verifier as an environment: the first turn is the last."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.types import Prompt, Trajectory, Verdict, Verifier


class OneTurn:
    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def step(self, prompt: Prompt, turns: Sequence[Trajectory]) -> Verdict:
        if len(turns) != 1:
            raise ValueError(f"a verifier judges one turn, not {len(turns)}")
        return self._verifier(prompt, turns)[0]
