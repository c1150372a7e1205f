"""Estimates the acceptance rate, the share of groups that pass the filter, for each data source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORY = 128.0
"""The time constant of the exponential decay, in groups: the policy changes, so old observations must fade."""
GUESS = (3.0, 4.0)
"""The prior before the first group: 3 of 4 are kept."""
PRIOR = 4.0
"""The weight of the overall rate in the rate of one source, in groups."""
LEAST = 0.02
CAUTION = 0.5
"""Standard errors added to the rate. Drawing too few groups is cheap, because the sampler tops them up a moment later;
drawing too many wastes samples or makes them stale."""


@dataclass(slots=True)
class _Count:
    kept: float = 0.0
    seen: float = 0.0

    def observe(self, kept: bool) -> None:
        fading = 1 - 1 / MEMORY
        self.kept = self.kept * fading + kept
        self.seen = self.seen * fading + 1


@dataclass(slots=True)
class Acceptance:
    """The recent share of groups that were kept."""

    overall: _Count = field(default_factory=lambda: _Count(*GUESS))
    sources: dict[str, _Count] = field(default_factory=dict)

    def observe(self, source: str, kept: bool) -> None:
        self.overall.observe(kept)
        self.sources.setdefault(source, _Count()).observe(kept)

    def rate(self, source: str) -> float:
        """The rate of one source, shrunk towards the overall rate while the source has few observations."""
        own = self.sources.get(source, _Count())
        seen = own.seen + PRIOR
        rate = (own.kept + PRIOR * self.overall.kept / self.overall.seen) / seen
        return min(max(rate + CAUTION * math.sqrt(rate * (1 - rate) / (seen + 1)), LEAST), 1.0)

    def state(self) -> dict[str, Any]:
        counts = {name: [count.kept, count.seen] for name, count in self.sources.items()}
        return {"overall": [self.overall.kept, self.overall.seen], "sources": counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Acceptance:
        sources = {name: _Count(*count) for name, count in state["sources"].items()}
        return cls(_Count(*state["overall"]), sources)
