"""The embedded game `guess`: find a number by asking; the answers are `higher` and `lower`."""

from __future__ import annotations

import random

from dapo_rl.envs.protocol import AssistantTurn, Observation
from dapo_rl.types import Prompt


class Guess:
    """A number between 0 and `most`. Each turn is a guess; finding it early is worth more."""

    deterministic = True

    def __init__(self, most: int = 9, guesses: int = 4) -> None:
        self._most, self._guesses = most, guesses
        self._number = 0

    def open(self, prompt: Prompt, seed: int) -> str:
        self._number = random.Random(f"guess:{seed}").randint(0, self._most)
        return f"0-{self._most}?"

    def step(self, turn: AssistantTurn) -> Observation:
        said = turn.text.strip()
        guess = int(said) if said.isascii() and said.isdigit() and len(said) < 5 else None
        if guess == self._number:
            return Observation(reward=1.0, done=True)
        if guess is None or turn.number >= self._guesses:
            return Observation(reward=0.0, done=True)
        return Observation("+" if self._number > guess else "-")
