"""A mixture that draws more often from sources with more informative groups.

The share of a source is its weight times its recent share of informative groups, those with a signal to train on. It
falls to no less than a tenth of that of a source whose groups all are, so that progress on it is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dapo_rl.base.saved import Finite
from dapo_rl.data.stream import REMEDY, MixedStream, SavedMixture, Stream, refuse_wrapped
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

FLOOR = 0.1
"""The least share of informative groups that a source counts with."""
MEMORY = 16.0
"""Batches of groups after which an observation counts about 1 / e."""


class SavedInformative(SavedMixture):
    credits: dict[str, Finite]
    seen: dict[str, list[Finite]]

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        names = self.drawn.keys()
        yield "credits or seen", not self.credits.keys() == self.seen.keys() == names
        yield "seen", any(len(entry) != 2 or not 0 <= entry[0] <= entry[1] for entry in self.seen.values())


class InformativeMixture(MixedStream):
    """Draws from the source with the most credit: each draw gives every source its share, and takes 1 from the one that
    is drawn from. With constant shares that is the order of the mixture with fixed weights."""

    def __init__(self, streams: Mapping[str, Stream], weights: Mapping[str, float], size: int, batch: int) -> None:
        """`batch` is the number of groups that a step trains on: the policy changes from step to step."""
        super().__init__(streams, weights, size)
        self._fade = 1 - 1 / (MEMORY * batch)
        self._credits = dict.fromkeys(streams, 0.0)
        self._seen: dict[str, list[float]] = {origin: [0.0, 0.0] for origin in streams}
        """By source: informative groups and all groups, faded."""

    def shares(self) -> dict[str, float]:
        """The shares of the sources in the next draws."""
        wanted = {origin: weight * max(FLOOR, self._rate(origin)) for origin, weight in self._shares.items()}
        total = sum(wanted.values())
        return {origin: value / total for origin, value in wanted.items()}

    def _rate(self, origin: str) -> float:
        """The recent share of informative groups; 1 before there are any."""
        informative, seen = self._seen[origin]
        return (informative + 1) / (seen + 1)

    def _next_origin(self) -> str:
        for origin, share in self.shares().items():
            self._credits[origin] += share
        origin = max(self._credits, key=self._credits.__getitem__)
        self._credits[origin] -= 1
        return origin

    def observe(self, prompt: Prompt, right: int, samples: int, informative: bool) -> None:
        for entry in self._seen.values():
            entry[:] = [number * self._fade for number in entry]
        own = self._seen[prompt.origin]
        own[:] = [own[0] + informative, own[1] + 1]
        super().observe(prompt, right, samples, informative)

    def state(self, unfinished: Iterable[str] = ()) -> dict[str, Any]:
        return super().state(unfinished) | {"credits": self._credits, "seen": self._seen}

    def restore(self, written: Any) -> None:
        refuse_wrapped(written, "credits")
        if isinstance(written, dict) and "sources" in written and "credits" not in written:
            raise UserError(f"sampling.source_weights was `fixed` when the checkpoint was written; {REMEDY}")
        state = self._restore(written, SavedInformative)
        self._credits = {origin: state.credits[origin] for origin in self._streams}
        self._seen = {origin: state.seen[origin] for origin in self._streams}
