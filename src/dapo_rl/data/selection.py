"""A curriculum: draws the prompts whose groups are likely to be informative, neither all right nor all wrong.

Prompts come in the order of the stream, and each is taken with a probability that grows with its predicted chance. One
that is passed over returns in the next epoch. The prediction is the prompt's own history, if it has been sampled, and
otherwise the recent share of informative groups among prompts of its data source and about its length, which is that
of all prompts until some have been seen. The training distribution shifts towards these prompts; their samples are not
weighted.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

from dapo_rl.base.saved import Count, Finite, Saved, parse_state
from dapo_rl.data.stream import REMEDY, Curriculum, Stream, refuse_wrapped
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

FLOOR = 0.1
"""Every prompt is taken with at least this probability, so the policy's progress on it is noticed."""
SHARPNESS = 2.0
"""How much less likely a prompt with half the chance is to be taken: 2 ** -SHARPNESS."""
MEMORY = 16.0
"""Batches of groups after which what was seen of a kind of prompts has faded to 1 / e."""
OWN_MEMORY = 128.0
"""The same for a prompt's own history, which is sparse."""
PRIOR = 2.0
"""The weight of the rate of all prompts in that of one kind, in groups."""
ALL = ""
"""The kind of all prompts."""


class SavedSelection(Saved):
    selected: dict[str, Any]
    front: list[str]
    candidates: Count
    groups: Count
    usual: list[Finite]
    kinds: dict[str, list[Finite]]
    prompts: dict[str, list[Finite]]

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        entries = [*self.kinds.values(), *self.prompts.values()]
        yield "kinds or prompts", any(len(entry) != 3 or not 0 <= entry[0] <= entry[1] for entry in entries)
        yield "usual", len(self.usual) != 2 or min(self.usual) < 0


class SelectedStream(Curriculum):
    def __init__(self, stream: Stream, seed: int, group_size: int, batch: int) -> None:
        """`batch`, the number of groups that a step trains on, is the unit of memories: the policy changes from step to
        step."""
        super().__init__(stream)
        self._seed, self._size = seed, group_size
        self._memory, self._own_memory = MEMORY * batch, OWN_MEMORY * batch
        self._candidates = self._groups = 0
        self._usual = [0.0, 0.0]
        """Sums of the chances of recent candidates, and of their squares."""
        self._kinds: dict[str, list[float]] = {}
        """By kind: informative groups and all groups, faded, and when they were last updated."""
        self._prompts: dict[str, list[float]] = {}
        """By prompt: right samples and all samples, faded, and when they were last updated."""

    def _next_prompt(self) -> Prompt:
        while True:
            prompt = self._stream.draw()
            self._candidates += 1
            if random.Random(f"{self._seed}:select:{self._candidates}").random() < self._probability(prompt):
                return prompt

    def _probability(self, prompt: Prompt) -> float:
        """How likely a candidate is taken: its chance relative to that of the usual informative group."""
        chance = self.chance(prompt)
        fade = 1 - 1 / self._memory
        first, second = self._usual = [self._usual[0] * fade + chance, self._usual[1] * fade + chance * chance]
        return max(FLOOR, math.pow(min(1.0, chance * first / second), SHARPNESS))

    def chance(self, prompt: Prompt) -> float:
        """The predicted probability that a group of this prompt is informative."""
        informative, seen, _ = self._faded(self._kinds.get(ALL), self._memory)
        of_all = (informative + 1) / (seen + 1)
        informative, seen, _ = self._faded(self._kinds.get(_kind(prompt)), self._memory)
        of_kind = (informative + PRIOR * of_all) / (seen + PRIOR)
        right, samples, _ = self._faded(self._prompts.get(prompt.id), self._own_memory)
        groups = samples / self._size
        return (of_kind + groups * _mixed(right, samples - right, self._size)) / (1 + groups)

    def _faded(self, entry: list[float] | None, memory: float) -> tuple[float, float, float]:
        if entry is None:
            return 0.0, 0.0, 0.0
        fade = math.exp((entry[2] - self._groups) / memory)
        return entry[0] * fade, entry[1] * fade, entry[2]

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        super().observe(prompt, right, samples, informative)
        self._groups += 1
        mixed = 0 < right < samples
        # Where scores, truncation or a filter decide, the group counts as if correctness had decided the same.
        as_right = right if informative == mixed else samples / 2 if informative else 0
        for entries, key, memory, new in (
            (self._kinds, ALL, self._memory, (informative, 1)),
            (self._kinds, _kind(prompt), self._memory, (informative, 1)),
            (self._prompts, prompt.id, self._own_memory, (as_right, samples)),
        ):
            first, second, _ = self._faded(entries.get(key), memory)
            entries[key] = [first + new[0], second + new[1], float(self._groups)]

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        front = [prompt.id for prompt in self._front]
        return {
            "selected": self._stream.state([*unfinished, *front]),
            "front": front,
            "candidates": self._candidates,
            "groups": self._groups,
            "usual": self._usual,
            "kinds": self._kinds,
            "prompts": self._prompts,
        }

    def restore(self, written: Any) -> None:
        refuse_wrapped(written, "selected")
        if isinstance(written, dict) and "selected" not in written:
            raise UserError(f"sampling.selection was `uniform` when the checkpoint was written; {REMEDY}")
        state = parse_state(SavedSelection, written)
        self._stream.restore(state.selected)
        self._front = deque(map(self.find, state.front))
        self._candidates, self._groups, self._usual = state.candidates, state.groups, state.usual
        self._kinds, self._prompts = state.kinds, state.prompts


def _kind(prompt: Prompt) -> str:
    """Prompts that are alike: of a data source, and of lengths within a fifth of each other."""
    return f"{round(4 * math.log2(max(len(prompt.token_ids), 1)))}:{prompt.data_source}"


def _mixed(right: float, wrong: float, size: int) -> float:
    """The probability that a group has right and wrong samples, with Jeffreys' prior of the pass rate."""
    a, b = right + 0.5, wrong + 0.5

    def all_of(a: float, b: float) -> float:
        """The mean of pass_rate ** size."""
        return math.exp(math.lgamma(a + size) - math.lgamma(a + b + size) - math.lgamma(a) + math.lgamma(a + b))

    return max(0.0, 1 - all_of(a, b) - all_of(b, a))
