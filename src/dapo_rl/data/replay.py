"""Replay of hard prompts: besides the epoch's order, a share of the draws goes to prompts that were solved, but seldom.

The pass rate of a prompt is that of its recent groups: each counts half as much as the next. A prompt joins the pool
when it is solved at a rate of at most the bound. It leaves the pool when it is drawn, and returns if its next group is
no better.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from dapo_rl.base.saved import Count, Finite, Saved, parse_state
from dapo_rl.data.stream import REMEDY, Curriculum, Stream
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt


class SavedReplay(Saved):
    replayed: dict[str, Any]
    """The state of the stream underneath."""
    front: list[str]
    draws: Count
    pool: list[str]
    history: dict[str, list[Finite]]

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        yield "history", any(len(entry) != 2 or not 0 <= entry[0] <= entry[1] for entry in self.history.values())
        yield "pool", len(set(self.pool)) < len(self.pool) or not self.history.keys() >= set(self.pool)


class ReplayStream(Curriculum):
    def __init__(self, stream: Stream, seed: int, share: float, highest: float) -> None:
        """`share` of the draws are replays while the pool has prompts: of pass rates above 0, up to `highest`."""
        super().__init__(stream)
        self._seed, self._share, self._highest = seed, share, highest
        self._draws = 0
        self._pool: list[Prompt] = []
        self._history: dict[str, list[float]] = {}
        """By prompt: right samples and all samples of its groups, each group at half the weight of the next."""

    def _next_prompt(self) -> Prompt:
        self._draws += 1
        dice = random.Random(f"{self._seed}:replay:{self._draws}")
        if dice.random() < self._share and self._pool:
            return self._pool.pop(int(dice.random() * len(self._pool)))
        prompt = self._stream.draw()
        self._leave(prompt)
        return prompt

    def _leave(self, prompt: Prompt) -> None:
        """A prompt that is being sampled is not drawn a second time."""
        self._pool = [other for other in self._pool if other.id != prompt.id]

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._leave(prompt)
        super().push_front(prompts)

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        super().observe(prompt, right, samples, informative)
        before = self._history.get(prompt.id, [0.0, 0.0])
        self._history[prompt.id] = [before[0] / 2 + right, before[1] / 2 + samples]
        self._leave(prompt)
        if 0 < self.pass_rate(prompt) <= self._highest:
            self._pool.append(prompt)

    def pass_rate(self, prompt: Prompt) -> float:
        """Of the prompt's recent groups; 0 before the first."""
        right, samples = self._history.get(prompt.id, (0.0, 0.0))
        return right / samples if samples else 0.0

    def skip(self, prompt: Prompt, epochs: int) -> None:
        self._leave(prompt)
        super().skip(prompt, epochs)

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        front, pool = [prompt.id for prompt in self._front], [prompt.id for prompt in self._pool]
        return {
            "replayed": self._stream.state([*unfinished, *front, *pool]),
            "front": front,
            "draws": self._draws,
            "pool": pool,
            "history": self._history,
        }

    def restore(self, written: Any) -> None:
        if isinstance(written, dict) and "replayed" not in written:
            raise UserError(f"sampling.replay_hard was 0 when the checkpoint was written; {REMEDY}")
        state = parse_state(SavedReplay, written)
        self._stream.restore(state.replayed)
        self._front = deque(map(self.find, state.front))
        self._pool = [self.find(name) for name in state.pool]
        self._draws, self._history = state.draws, state.history
