"""How many groups pass the filter: an estimate for each data source, which starts from a guess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORY = 128.0
"""Groups after which an observation has lost most of its weight: the policy moves."""
GUESS = (3.0, 4.0)
"""What is believed before the first group: 3 of 4 are kept."""
PRIOR = 4.0
"""Groups that the rate of all sources counts for, in the rate of one."""
LEAST = 0.02
CAUTION = 0.5
"""Standard errors by which the rate is taken to be higher. Too few groups are topped up a moment later; too many are
sampled for nothing, or by weights that are old when their turn comes."""


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
    """The share of groups that are kept, as seen lately."""

    overall: _Count = field(default_factory=lambda: _Count(*GUESS))
    sources: dict[str, _Count] = field(default_factory=dict)

    def observe(self, source: str, kept: bool) -> None:
        self.overall.observe(kept)
        self.sources.setdefault(source, _Count()).observe(kept)

    def rate(self, source: str) -> float:
        """What one source has shown, leaning on all of them while it has shown little."""
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
