"""What filling one batch gives, and what has happened so far while it is being filled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dapo_rl.fates import FATES, Fate
from dapo_rl.types import Group


@dataclass(frozen=True, slots=True)
class Fill:
    """The outcome of filling one batch."""

    kept: tuple[Group, ...]
    """In the order drawn."""
    dropped: tuple[tuple[Group, Fate], ...]
    sampled: tuple[Group, ...]
    """All groups that got their verdicts in this step, whatever became of them; `kept` may hold older ones too."""
    version: int = 0
    """The weights that the step sampled with."""
    filled_up: frozenset[int] = frozenset()
    """The draws of groups without a signal that `on_cap: fill` put into the batch: they count, and teach nothing."""
    carried_over: int = 0
    """Good groups that wait for the next step."""
    in_flight: int = 0
    """Groups that continue in the next step."""
    tokens_generated: int = 0
    """Of samples that ended in this step: finished, or cancelled."""
    tokens_cancelled: int = 0
    """Of groups that were cancelled before they were whole."""
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Time that the engine waited for verdicts."""
    notes: tuple[str, ...] = ()
    """What the user should know: what happened at the cap, and whether the engine waited for verdicts."""

    def fates(self) -> Counter[Fate]:
        return Counter(fate for _, fate in self.dropped) + Counter({"kept": len(self.kept)})


@dataclass(slots=True)
class Filling:
    """A batch of `n` groups that is being filled."""

    n: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[tuple[Group, Fate]] = field(default_factory=list)
    sampled: list[Group] = field(default_factory=list)
    drawn: int = 0
    finished_tokens: int = 0
    cancelled_tokens: int = 0
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def missing(self) -> int:
        return self.n - len(self.kept)

    def reasons(self) -> str:
        """Why groups were dropped, in words."""
        counts = Counter(fate for _, fate in self.dropped)
        return ", ".join(f"{count} {FATES[fate].label}" for fate, count in counts.items()) or "none dropped"
