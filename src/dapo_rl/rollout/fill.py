"""The result of filling one batch, and its state while it is being filled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dapo_rl.fates import FATES, Fate
from dapo_rl.types import Group


@dataclass(frozen=True, slots=True)
class Fill:
    """The result of filling one batch."""

    kept: tuple[Group, ...]
    """In the order drawn."""
    dropped: tuple[tuple[Group, Fate], ...]
    sampled: tuple[Group, ...]
    """All groups judged in this step, kept or not; `kept` can also contain older ones."""
    version: int = 0
    """The version of the weights that sampled in this step."""
    filled_up: frozenset[int] = frozenset()
    """The draws of uninformative groups that `on_cap: fill` added to the batch; their advantages are 0."""
    carried_over: int = 0
    """Good groups that wait for the next step."""
    in_flight: int = 0
    """Groups that continue in the next step."""
    tokens_generated: int = 0
    """Tokens of the samples that finished or were cancelled in this step."""
    tokens_cancelled: int = 0
    """Tokens of groups that were cancelled before all their samples finished."""
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Time that the engine waited for verdicts."""
    earlier_seconds: float = 0.0
    """Time spent on it before it was interrupted."""
    notes: tuple[str, ...] = ()
    """Notes for the user: whether scores are graded, what `on_cap` did, whether the engine waited for verdicts."""

    def fates(self) -> Counter[Fate]:
        return Counter(fate for _, fate in self.dropped) + Counter({"kept": len(self.kept)})


@dataclass(slots=True)
class Filling:
    """A batch of `n` groups, or more if more are due, that is being filled."""

    n: int
    kept: list[Group] = field(default_factory=list)
    dropped: list[tuple[Group, Fate]] = field(default_factory=list)
    sampled: list[Group] = field(default_factory=list)
    drawn: int = 0
    finished_tokens: int = 0
    cancelled_tokens: int = 0
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0
    earlier_seconds: float = 0.0
    """Time spent on it before it was interrupted."""
    notes: list[str] = field(default_factory=list)
    due: int = -1
    """Good groups up to this draw are trained on in this step, because they would be too old in the next one."""

    @property
    def missing(self) -> int:
        return max(0, self.n - len(self.kept))

    @property
    def tokens_generated(self) -> int:
        return self.finished_tokens + self.cancelled_tokens

    def reasons(self) -> str:
        """The reasons why groups were dropped, with counts."""
        counts = Counter(fate for _, fate in self.dropped)
        return ", ".join(f"{count} {FATES[fate].label}" for fate, count in counts.items()) or "none dropped"
