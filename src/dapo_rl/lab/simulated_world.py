"""A simulated task: endless prompts, the lengths of their responses, and which groups pass the filter."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from dapo_rl.types import Prompt, Trajectory, Verdict

LONGEST = 4096


@dataclass(frozen=True, slots=True)
class World:
    """The response lengths of each prompt, and whether its group passes."""

    acceptance: float
    group: int
    seed: int = 0
    median: float = 250.0
    spread: float = 1.0
    """The standard deviation of the log length: at 1 the mean is 1.65 medians, and 1% of lengths exceed 10 medians."""
    longest: int = LONGEST

    def lengths(self, prompt: str) -> tuple[int, ...]:
        return _lengths(self, prompt)

    def passes(self, prompt: str) -> bool:
        return _chance(self.seed, prompt) < self.acceptance

    def least_tokens(self, groups: int) -> int:
        """The tokens of an oracle that stops drawing at the last group it needs."""
        tokens = found = number = 0
        while found < groups:
            name = f"p{number}"
            tokens += sum(self.lengths(name))
            found += self.passes(name)
            number += 1
        return tokens


@lru_cache(maxsize=2**14)
def _lengths(world: World, prompt: str) -> tuple[int, ...]:
    rng = random.Random(f"{world.seed}:length:{prompt}")
    draws = (rng.lognormvariate(math.log(world.median), world.spread) for _ in range(world.group))
    return tuple(min(max(1, round(length)), world.longest) for length in draws)


@lru_cache(maxsize=2**14)
def _chance(seed: int, prompt: str) -> float:
    return random.Random(f"{seed}:passes:{prompt}").random()


class EndlessPrompts:
    def __init__(self) -> None:
        self._front: list[Prompt] = []
        self._next = 0

    def draw(self) -> Prompt:
        if self._front:
            return self._front.pop(0)
        self._next += 1
        return self.find(f"p{self._next - 1}")

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        self._front = [*prompts, *self._front]

    def find(self, prompt_id: str) -> Prompt:
        return Prompt(prompt_id, prompt_id, np.array([int(prompt_id[1:])], np.int32))

    def skip(self, prompt: Prompt, epochs: int) -> None:
        raise NotImplementedError("no prompt comes twice")

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        pass


class NoWeights:
    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        return iter(())


class SaysSo:
    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")
        return [right if sample.text == "right" else wrong for sample in samples]
