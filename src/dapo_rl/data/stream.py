"""The order in which prompts are drawn: endless, reshuffled every epoch, and resumable at any draw."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

FILE = "stream.json"
REMEDY = "resume with the same data and data settings"


class SavedStream(Saved):
    prompts: Count
    fingerprint: str
    seed: int
    drawn: Count
    front: list[str]
    resting: dict[str, Count]


class PromptStream(Iterator[Prompt]):
    """Every epoch is a permutation of the prompts that depends only on the seed and the epoch, and on the name of an
    entry of a list of sources."""

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0, origin: str = "") -> None:
        if not prompts:
            raise UserError("there are no prompts to draw from")
        self._prompts = prompts
        self._seed = seed
        self._origin = origin
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if len(self._by_id) < len(prompts):
            raise ValueError("the ids of prompts are not unique")
        self._drawn = 0
        self._front: deque[Prompt] = deque()
        self._resting: dict[str, int] = {}
        """Prompts that are skipped, and the epoch in which they return."""
        self._order: list[int] = []
        self._order_of = -1  # the epoch of this order

    @property
    def epoch(self) -> int:
        """The epoch of the next draw, from 0."""
        return self._drawn // len(self._prompts)

    @property
    def epochs_drawn(self) -> float:
        """Passes over the prompts so far, as a fraction."""
        return self._drawn / len(self._prompts)

    def draw(self) -> Prompt:
        if self._front:
            return self._front.popleft()
        while True:
            epoch = self.epoch
            if self._order_of != epoch:
                self._order, self._order_of = self._permutation(epoch), epoch
            prompt = self._prompts[self._order[self._drawn % len(self._prompts)]]
            self._drawn += 1
            if self._resting.get(prompt.id, 0) <= epoch:
                self._resting.pop(prompt.id, None)
                return prompt

    def rest(self, prompt: Prompt, epochs: int) -> None:
        """Skips a prompt for a number of epochs after the current one."""
        self._resting[prompt.id] = self.epoch + epochs + 1

    def __next__(self) -> Prompt:
        return self.draw()

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Draws these prompts next, in this order, before the stream continues."""
        unknown = [prompt.id for prompt in prompts if prompt.id not in self._by_id]
        if unknown:
            raise ValueError(f"prompt {unknown[0]} is not in the stream")
        self._front.extendleft(reversed(prompts))

    def find(self, prompt_id: str) -> Prompt:
        if prompt_id not in self._by_id:
            raise ValueError(f"there is no prompt {shown(prompt_id)}")
        return self._by_id[prompt_id]

    def save(self, directory: Path) -> None:
        """Where the next draw stands, for a stream of the same prompts."""
        write_state(directory / FILE, self.state())

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            self.restore(read_state(path))

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        return {
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "drawn": self._drawn,
            "front": [prompt.id for prompt in self._front],
            "resting": dict(self._resting),
        }

    def restore(self, written: Any) -> None:
        """Raises ValueError for a state of the wrong shape."""
        if isinstance(written, dict) and "digest" in written:
            raise UserError(f"{self._what} has a known length, but the checkpoint was written with a stream; {REMEDY}")
        if isinstance(written, dict) and "sources" in written:
            raise UserError(
                f"{self._what} has no weights, but the checkpoint was written with a list that has; {REMEDY}"
            )
        state = parse_state(SavedStream, written)
        self._check_same(state)
        if unknown := [name for name in state.front if name not in self._by_id]:
            raise ValueError(f"front: there is no prompt {shown(unknown[0])}")
        self._drawn = state.drawn
        self._front = deque(self._by_id[name] for name in state.front)
        self._resting = dict(state.resting)

    def _check_same(self, state: SavedStream) -> None:
        if state.prompts != len(self._prompts):
            raise UserError(
                f"{self._what} has {counted(len(self._prompts), 'prompt')}, the checkpoint was written with "
                f"{state.prompts}; {REMEDY}"
            )
        if state.fingerprint != self._fingerprint:
            raise UserError(
                f"{self._what} has different prompts or answers than the checkpoint was written with; {REMEDY}"
            )
        if state.seed != self._seed:
            raise UserError(
                f"seed {self._seed} draws prompts in a different order than the checkpoint; "
                f"resume with seed={state.seed}"
            )

    @property
    def _what(self) -> str:
        return f"data.train: {self._origin}" if self._origin else "data.train"

    def _permutation(self, epoch: int) -> list[int]:
        # Python guarantees the same numbers across versions for random(), but not for shuffle().
        rng = random.Random(f"{self._seed}:{epoch}:{self._origin}" if self._origin else f"{self._seed}:{epoch}")
        keys = [rng.random() for _ in self._prompts]
        return sorted(range(len(keys)), key=keys.__getitem__)

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of everything that a sample and its verdict depend on."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            ids = prompt.token_ids.tolist()
            parts = (prompt.id, prompt.text, ids, prompt.answer, prompt.data_source, prompt.columns)
            # Objects that JSON cannot represent count by their type: their text may contain an address.
            digest.update(json.dumps(parts, default=type_name, skipkeys=True).encode() + b"\n")
        return digest.hexdigest()[:16]


def type_name(value: object) -> str:
    return type(value).__name__
