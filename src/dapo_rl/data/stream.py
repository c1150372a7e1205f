"""The order in which prompts are drawn: endless, and resumable at any draw."""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

FILE = "stream.json"
REMEDY = "resume with the same data and data settings"


class Stream(ABC, Iterator[Prompt]):
    """Prompts without end. `save` writes where the next draw stands; `load` continues there, with the same data."""

    def __init__(self) -> None:
        self._front: deque[Prompt] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the next draw, from 0."""
        return int(self.epochs_drawn)

    @property
    @abstractmethod
    def epochs_drawn(self) -> float:
        """Passes over the prompts so far."""

    @abstractmethod
    def _next_prompt(self) -> Prompt: ...

    @abstractmethod
    def find(self, prompt_id: str) -> Prompt:
        """A prompt of an unfinished group, after `load`."""

    @abstractmethod
    def skip(self, prompt: Prompt, epochs: int) -> None:
        """Skips a prompt for a number of epochs after the current one."""

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        """Takes how many samples of a group were right, and whether the group has a signal to train on. Groups on which
        a verifier or an environment failed say nothing, and are not passed."""

    @abstractmethod
    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]: ...

    @abstractmethod
    def restore(self, written: Any) -> None:
        """Raises ValueError for a state of the wrong shape."""

    def watch(self, check: Callable[[Prompt], None], note: Callable[[str], None]) -> None:
        """Sets functions that are called with prompts as they are read, and with lines for the user."""

    def counts(self) -> dict[str, int]:
        """How many rows were used and dropped so far; empty if they were all read in advance."""
        return {}

    def draw(self) -> Prompt:
        return self._front.popleft() if self._front else self._next_prompt()

    def __next__(self) -> Prompt:
        return self.draw()

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Draws these prompts next, in this order, before the stream continues."""
        self._front.extendleft(reversed(prompts))

    def save(self, directory: Path, unfinished: Iterable[str] = ()) -> None:
        """`unfinished` are the ids that `find` must know after `load`."""
        write_state(directory / FILE, self.state(unfinished))

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            self.restore(read_state(path))


class Curriculum(Stream):
    """Chooses among the draws of another stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    @property
    def epochs_drawn(self) -> float:
        return self._stream.epochs_drawn

    def find(self, prompt_id: str) -> Prompt:
        return self._stream.find(prompt_id)

    def skip(self, prompt: Prompt, epochs: int) -> None:
        self._stream.skip(prompt, epochs)

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        self._stream.observe(prompt, right, samples, informative)

    def watch(self, check: Callable[[Prompt], None], note: Callable[[str], None]) -> None:
        self._stream.watch(check, note)

    def counts(self) -> dict[str, int]:
        return self._stream.counts()


def refuse_wrapped(written: Any, *own: str) -> None:
    """Raises a UserError for the state of a stream with a curriculum around it that this run does not have."""
    settings = {
        "replayed": "sampling.replay_hard was above 0",
        "selected": "sampling.selection was `informative`",
        "credits": "sampling.source_weights was `informative`",
    }
    for key, what in settings.items():
        if isinstance(written, dict) and key in written and key not in own:
            raise UserError(f"{what} when the checkpoint was written; {REMEDY}")


class SavedStream(Saved):
    prompts: Count
    fingerprint: str
    seed: int
    drawn: Count
    front: list[str]
    resting: dict[str, Count]


class PromptStream(Stream):
    """A list of prompts, reshuffled every epoch. The permutation depends only on the seed and the epoch, and on the
    name of an entry of a list of sources."""

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0, origin: str = "") -> None:
        super().__init__()
        if not prompts:
            raise UserError("there are no prompts to draw from")
        self._prompts = prompts
        self._seed = seed
        self._origin = origin
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if len(self._by_id) < len(prompts):
            raise ValueError("the ids of prompts are not unique")
        self._drawn = 0
        self._resting: dict[str, int] = {}
        """Prompts that are skipped, and the epoch in which they return."""
        self._order: list[int] = []
        self._order_of = -1  # the epoch of this order

    @property
    def epoch(self) -> int:
        return self._drawn // len(self._prompts)

    @property
    def epochs_drawn(self) -> float:
        return self._drawn / len(self._prompts)

    def _next_prompt(self) -> Prompt:
        size = len(self._prompts)
        while True:
            if len(self._resting) == size and self._drawn % size == 0:  # until the first one returns, none is drawn
                self._drawn = max(self._drawn, min(self._resting.values()) * size)
            epoch = self.epoch
            if self._order_of != epoch:
                self._order, self._order_of = self._permutation(epoch), epoch
            prompt = self._prompts[self._order[self._drawn % size]]
            self._drawn += 1
            if self._resting.get(prompt.id, 0) <= epoch:
                self._resting.pop(prompt.id, None)
                return prompt

    def skip(self, prompt: Prompt, epochs: int) -> None:
        self._resting[prompt.id] = self.epoch + epochs + 1

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        unknown = [prompt.id for prompt in prompts if prompt.id not in self._by_id]
        if unknown:
            raise ValueError(f"prompt {unknown[0]} is not in the stream")
        super().push_front(prompts)

    def find(self, prompt_id: str) -> Prompt:
        if prompt_id not in self._by_id:
            raise ValueError(f"there is no prompt {shown(prompt_id)}")
        return self._by_id[prompt_id]

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
        refuse_wrapped(written)
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


class SavedMixture(Saved):
    drawn: dict[str, Count]
    sources: dict[str, dict[str, Any]]
    front: list[str]


M = TypeVar("M", bound=SavedMixture)


class MixedStream(Stream):
    """Several sources, mixed in proportion to their weights; each is drawn from in its own order.

    Draws from the source that is furthest behind its share; of several, from the first. Which one is next depends on
    the weights and on the number of draws alone, so the shares hold for every stretch of draws, not only on average.
    """

    def __init__(self, streams: Mapping[str, Stream], weights: Mapping[str, float], size: int) -> None:
        """`size` is the number of draws of an epoch; 0: it has none, because some source is a stream."""
        super().__init__()
        total = sum(weights.values())
        self._streams = dict(streams)
        self._shares = {origin: weights[origin] / total for origin in streams}
        self._drawn = dict.fromkeys(streams, 0)
        self._size = size

    @property
    def epochs_drawn(self) -> float:
        """Draws in multiples of the number of prompts; with a stream, the passes over the source with the fewest."""
        if self._size:
            return sum(self._drawn.values()) / self._size
        return min(stream.epochs_drawn for stream in self._streams.values())

    def _next_prompt(self) -> Prompt:
        origin = self._next_origin()
        self._drawn[origin] += 1
        return self._streams[origin].draw()

    def _next_origin(self) -> str:
        after = sum(self._drawn.values()) + 1
        return max(self._shares, key=lambda name: self._shares[name] * after - self._drawn[name])

    def skip(self, prompt: Prompt, epochs: int) -> None:
        self._streams[prompt.origin].skip(prompt, epochs)

    def find(self, prompt_id: str) -> Prompt:
        origin = prompt_id.rpartition(":")[0]
        if origin not in self._streams:
            raise ValueError(f"there is no prompt {shown(prompt_id)}")
        return self._streams[origin].find(prompt_id)

    def watch(self, check: Callable[[Prompt], None], note: Callable[[str], None]) -> None:
        for stream in self._streams.values():
            stream.watch(check, note)

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        front = [prompt.id for prompt in self._front]
        wanted = [*unfinished, *front]
        states = {
            origin: stream.state([name for name in wanted if name.rpartition(":")[0] == origin])
            for origin, stream in self._streams.items()
        }
        return {"drawn": self._drawn, "sources": states, "front": front}

    def restore(self, written: Any) -> None:
        refuse_wrapped(written)
        self._restore(written, SavedMixture)

    def _restore(self, written: Any, form: type[M]) -> M:
        if isinstance(written, dict) and "sources" not in written:
            raise UserError(f"data.train is a list with weights, unlike in the checkpoint; {REMEDY}")
        state = parse_state(form, written)
        if not state.drawn.keys() == state.sources.keys() == self._streams.keys():
            raise UserError(f"data.train has different sources than the checkpoint was written with; {REMEDY}")
        for origin, stream in self._streams.items():
            stream.restore(state.sources[origin])
        self._drawn = {origin: state.drawn[origin] for origin in self._streams}
        self._front = deque(self.find(name) for name in state.front)
        return state


def type_name(value: object) -> str:
    return type(value).__name__
