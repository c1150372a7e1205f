"""Estimates the acceptance rate, the share of groups that pass the filter, for each data source."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import Field

from dapo_rl.base.saved import Saved

MEMORY = 128.0
"""The time constant of the exponential decay, in groups: the policy changes, so old observations must fade."""
PRIOR = 4.0
"""The weight of the overall rate in the rate of one source, in groups."""
LEAST = 0.02
CAUTION = 0.5
"""Standard errors added to the rate. Drawing too few groups is cheap, because the sampler tops them up a moment later;
drawing too many wastes samples or makes them stale."""


Seen = Annotated[float, Field(ge=0, le=1e9)]
"""A number of groups, of which old ones count less."""


class Rate(NamedTuple):
    kept: Seen = 0.0
    seen: Seen = 0.0

    def after(self, kept: bool) -> Rate:
        fading = 1 - 1 / MEMORY
        return Rate(self.kept * fading + kept, self.seen * fading + 1)


class Acceptance(Saved):
    """The recent share of groups that were kept."""

    overall: Rate = Rate(3.0, 4.0)
    """At first a guess: 3 of 4 are kept."""
    sources: dict[str, Rate] = Field(default_factory=dict)

    def observe(self, source: str, kept: bool) -> None:
        self.overall = self.overall.after(kept)
        self.sources[source] = self.sources.get(source, Rate()).after(kept)

    def rate(self, source: str) -> float:
        """The rate of one source, shrunk towards the overall rate while the source has few observations."""
        own = self.sources.get(source, Rate())
        seen = own.seen + PRIOR
        rate = (own.kept + PRIOR * self.overall.kept / self.overall.seen) / seen
        return min(max(rate + CAUTION * math.sqrt(rate * (1 - rate) / (seen + 1)), LEAST), 1.0)
