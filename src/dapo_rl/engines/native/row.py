"""A sample that has a slot: a row of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_rl.engines.protocol import Request
from dapo_rl.engines.stopping import StopSearch
from dapo_rl.types import Trajectory

NO_SLOT = -1


@dataclass(slots=True)
class BatchRow:
    arrival: int
    """The place of its request in the order of arrival."""
    request: Request
    begun: Trajectory
    """Its state when it was given its slot."""
    slot: int
    """`NO_SLOT` once it has given it up."""
    written: int = 0
    """Tokens generated, as of the last look at the device."""
    search: StopSearch | None = None
    """The search for stop strings, if the request has any."""

    @property
    def index(self) -> int:
        return self.begun.index

    @property
    def context(self) -> int:
        """The tokens of its prompt and response."""
        return len(self.request.prompt_ids) + self.written

    @property
    def age(self) -> tuple[int, int]:
        """Orders samples from the oldest to the youngest."""
        return self.arrival, self.index
