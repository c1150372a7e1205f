"""The embedded game `guess`: find a number by guessing; the world says whether it is larger or smaller.

The conversation is in the language of the embedded model's sums. `7+=?` means: it is more than 7.
"""

from __future__ import annotations

import random
import re

from dapo_rl.envs.protocol import AssistantTurn, Observation
from dapo_rl.types import Prompt

_ANSWER = re.compile(r"Answer: (\d{1,4})\s*\Z")


class Guess:
    """The number is between 1 and `most`; with the defaults, halving the range always finds it."""

    deterministic = True

    def __init__(self, most: int = 7, guesses: int = 3) -> None:
        self._most, self._guesses = most, guesses
        self._number = 0

    def open(self, prompt: Prompt, seed: int) -> str:
        self._number = random.Random(f"guess:{seed}").randint(1, self._most)
        return "0+=?\n"

    def step(self, turn: AssistantTurn) -> Observation:
        said = _ANSWER.search(turn.text)
        if said is None:
            return Observation(done=True, correct=False)
        guess = int(said[1])
        if guess == self._number:
            return Observation(reward=1.0, done=True, correct=True)
        if turn.number >= self._guesses:
            return Observation(done=True, correct=False)
        return Observation(f"{guess}{'+' if self._number > guess else '-'}=?")
