"""Prompts of several sources, mixed in proportion to their weights.

Each source is drawn from in its own order: reshuffled every time it has been passed, or as a stream comes. Which
source is next depends on the weights and on the number of draws alone, so that the shares hold for every stretch of
draws, not only on average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.data.lazy import LazyStream
from dapo_rl.data.prompts import PromptSet
from dapo_rl.data.stream import FILE, REMEDY, PromptStream
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt


class SavedMixture(Saved):
    drawn: dict[str, Count]
    sources: dict[str, dict[str, Any]]
    front: list[str]


class MixedStream(Iterator[Prompt]):
    """Draws from the source that is furthest behind its share; of several, from the first."""

    def __init__(
        self, streams: Mapping[str, PromptStream | LazyStream], weights: Mapping[str, float], size: int
    ) -> None:
        """`size` is the number of draws of an epoch; 0: it has none, because some source is a stream."""
        total = sum(weights.values())
        self._streams = dict(streams)
        self._shares = {origin: weights[origin] / total for origin in streams}
        self._drawn = dict.fromkeys(streams, 0)
        self._front: deque[Prompt] = deque()
        self._size = size

    @property
    def epochs_drawn(self) -> float:
        """Draws in multiples of the number of prompts; with a stream, the passes over the source with the fewest."""
        if self._size:
            return sum(self._drawn.values()) / self._size
        return min(stream.epochs_drawn for stream in self._streams.values())

    @property
    def epoch(self) -> int:
        return int(self.epochs_drawn)

    def draw(self) -> Prompt:
        if self._front:
            return self._front.popleft()
        after = sum(self._drawn.values()) + 1
        origin = max(self._shares, key=lambda name: self._shares[name] * after - self._drawn[name])
        self._drawn[origin] += 1
        return self._streams[origin].draw()

    def __next__(self) -> Prompt:
        return self.draw()

    def rest(self, prompt: Prompt, epochs: int) -> None:
        """Skips a prompt for a number of passes over its source."""
        self._streams[prompt.origin].rest(prompt, epochs)

    def push_front(self, prompts: Sequence[Prompt]) -> None:
        """Draws these prompts next, in this order, before the stream continues."""
        self._front.extendleft(reversed(prompts))

    def find(self, prompt_id: str) -> Prompt:
        origin = prompt_id.rpartition(":")[0]
        if origin not in self._streams:
            raise ValueError(f"there is no prompt {shown(prompt_id)}")
        return self._streams[origin].find(prompt_id)

    def watch(self, check: Callable[[Prompt], None], note: Callable[[str], None]) -> None:
        """Sets what streams call with their prompts and with lines for the user."""
        for stream in self._streams.values():
            if isinstance(stream, LazyStream):
                stream.watch(check, note)

    def save(self, directory: Path, unfinished: Iterable[str] = ()) -> None:
        """Where the next draw stands; `unfinished` are the ids that `find` must know after `load`."""
        front = [prompt.id for prompt in self._front]
        wanted = [*unfinished, *front]
        states = {
            origin: stream.state([name for name in wanted if name.rpartition(":")[0] == origin])
            for origin, stream in self._streams.items()
        }
        write_state(directory / FILE, {"drawn": self._drawn, "sources": states, "front": front})

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            written = read_state(path)
            if isinstance(written, dict) and "sources" not in written:
                raise UserError(f"data.train is a list with weights, unlike in the checkpoint; {REMEDY}")
            state = parse_state(SavedMixture, written)
            if not state.drawn.keys() == state.sources.keys() == self._streams.keys():
                raise UserError(f"data.train has different sources than the checkpoint was written with; {REMEDY}")
            for origin, stream in self._streams.items():
                stream.restore(state.sources[origin])
            self._drawn = {origin: state.drawn[origin] for origin in self._streams}
            self._front = deque(self.find(name) for name in state.front)


Stream = PromptStream | LazyStream | MixedStream


def stream_of(prompts: PromptSet, seed: int) -> Stream:
    """The order in which the prompts are drawn."""
    if not prompts.parts:
        return prompts.stream or PromptStream(prompts.prompts, seed)
    origins = [part.prompts[0].origin for part in prompts.parts]
    streams = {
        origin: part.stream or PromptStream(part.prompts, seed, origin)
        for origin, part in zip(origins, prompts.parts, strict=True)
    }
    weights = {origin: part.weight for origin, part in zip(origins, prompts.parts, strict=True)}
    return MixedStream(streams, weights, 0 if prompts.is_stream else len(prompts.prompts))
