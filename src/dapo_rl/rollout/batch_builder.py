"""The batch of a step while it is being filled: groups join it in the order in which their prompts were drawn.

Taking groups in the order they finish would favour short answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dapo_rl.base.format import counted
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import CapReachedError
from dapo_rl.outcomes import OUTCOMES, Outcome
from dapo_rl.rollout.dynamic_sampling import has_spread
from dapo_rl.rollout.in_flight import Unread
from dapo_rl.types import Group, Prompt


@dataclass(slots=True)
class SampledBatch:
    """The batch of a step while it is being sampled, and when it is full."""

    kept: list[Group] = field(default_factory=list)
    """In the order drawn."""
    dropped: list[tuple[Group, Outcome]] = field(default_factory=list)
    sampled: list[Group] = field(default_factory=list)
    """All groups judged in this step, kept or not; `kept` can also contain older ones."""
    n: int = 0
    """The number of groups to keep; more are kept if more are due."""
    due: int = -1
    """Good groups up to this draw are trained on in this step, because they would be too old in the next one."""
    drawn: int = 0
    tokens_finished: int = 0
    """Tokens of the samples that finished in this step."""
    tokens_cancelled: int = 0
    """Tokens of groups that were cancelled before all their samples finished."""
    tokens_restarted: int = 0
    """Tokens of episodes that started again, because their environments did not survive a restart of the run."""
    generate_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Time that the engine waited for verdicts."""
    earlier_seconds: float = 0.0
    """Time spent on it before it was interrupted."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user: whether scores are graded, what `on_cap` did, whether the engine waited for verdicts."""
    version: int = 0
    """The version of the weights that sampled in this step."""
    filled_up: frozenset[int] = frozenset()
    """The draws of uninformative groups that `on_cap: fill` added to the batch; their advantages are 0."""
    carried_over: int = 0
    """Good groups that wait for the next step."""
    in_flight: int = 0
    """Groups that continue in the next step."""

    @property
    def missing(self) -> int:
        return max(0, self.n - len(self.kept))

    @property
    def tokens_generated(self) -> int:
        """Tokens of the samples that finished, were cancelled or started again in this step."""
        return self.tokens_finished + self.tokens_cancelled + self.tokens_restarted

    def without(self, filled_up: Collection[int], dropped: Iterable[tuple[Group, Outcome]]) -> SampledBatch:
        """A copy in which the groups that fill it up are dropped again, as they were in `dropped`."""
        again = [(group, outcome) for group, outcome in dropped if group.draw in filled_up]
        kept = [group for group in self.kept if group.draw not in filled_up]
        return replace(self, kept=kept, dropped=[*again, *self.dropped], sampled=[*self.sampled])

    def outcomes(self) -> Counter[Outcome]:
        return Counter(outcome for _, outcome in self.dropped) + Counter({"kept": len(self.kept)})

    def reasons(self) -> str:
        """The reasons why groups were dropped, with counts."""
        counts = Counter(outcome for _, outcome in self.dropped)
        return ", ".join(f"{count} {OUTCOMES[outcome].label}" for outcome, count in counts.items()) or "none dropped"


@dataclass(frozen=True, slots=True)
class PausedBatch:
    batch: SampledBatch
    rejected: tuple[tuple[Group, Outcome], ...] = ()
    """Groups that are not kept, and wait for the verdicts of earlier draws."""
    unread: tuple[Unread, ...] = ()

    @property
    def prompts(self) -> list[Prompt]:
        groups = [*self.batch.kept, *(group for group, _ in (*self.batch.dropped, *self.rejected))]
        return [*(group.prompt for group in groups), *(unread.flight.prompt for unread in self.unread)]

    @property
    def waiting_tokens(self) -> int:
        """Tokens of its complete groups that no outcome has been recorded for."""
        groups = [*self.batch.kept, *(group for group, _ in self.rejected)]
        return sum(group.tokens for group in groups) + sum(unread.flight.finished_tokens for unread in self.unread)


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """What a step had sampled when the run failed in it."""

    fill: SampledBatch
    """Its dropped groups, and the tokens that it generated. Kept groups are not in it: nothing was trained on them."""
    unfinished: Sequence[Group]
    """All other groups, with the samples that had finished. Those that were not judged have no verdicts."""

    @classmethod
    def of_update(cls, fill: SampledBatch) -> FailedBatch:
        """Of a step that failed after its batch was full."""
        return cls(replace(fill, kept=[]), fill.kept)


class Admission:
    """Judged groups that wait for the verdicts of earlier draws, or for the next step."""

    def __init__(self, carried: Iterable[Group] = (), rejected: Iterable[tuple[Group, Outcome]] = ()) -> None:
        """`rejected` groups wait for earlier draws, in a step that was interrupted."""
        self._judged: dict[int, tuple[Group, Outcome]] = {group.draw: (group, "kept") for group in carried}
        self._judged |= {group.draw: (group, outcome) for group, outcome in rejected}

    def __len__(self) -> int:
        return len(self._judged)

    @property
    def good(self) -> int:
        """Groups that will be kept."""
        return sum(outcome == "kept" for _, outcome in self._judged.values())

    @property
    def carried(self) -> tuple[Group, ...]:
        """Good groups that wait for the next step, or for earlier draws, in the order drawn."""
        return tuple(group for _, (group, outcome) in sorted(self._judged.items()) if outcome == "kept")

    @property
    def rejected(self) -> tuple[tuple[Group, Outcome], ...]:
        """Other groups that wait for earlier draws, in the order drawn. Between steps there are none."""
        return tuple((group, outcome) for _, (group, outcome) in sorted(self._judged.items()) if outcome != "kept")

    def add(self, group: Group, outcome: Outcome) -> None:
        self._judged[group.draw] = (group, outcome)

    def admit(self, batch: SampledBatch, first_out: float) -> None:
        """Admits groups in the order drawn, up to `first_out`, the first draw without a verdict. A full batch admits
        only groups that are due."""
        for draw in sorted(self._judged):
            if draw > first_out or (not batch.missing and draw > batch.due):
                break
            group, outcome = self._judged.pop(draw)
            if outcome == "kept":
                batch.kept.append(group)
            else:
                batch.dropped.append((group, outcome))

    def settle(self, batch: SampledBatch, surplus: str) -> list[Group]:
        """Ends a step: only carried groups stay. Returns the others, which are dropped."""
        removed: list[Group] = []
        for draw in sorted(self._judged):
            group, outcome = self._judged[draw]
            if outcome == "kept" and surplus == "carry":
                continue
            removed.append(group)
            batch.dropped.append((group, "surplus" if outcome == "kept" else outcome))
            del self._judged[draw]
        return removed


def at_cap(batch: SampledBatch, settings: SamplingSettings) -> tuple[frozenset[int], str | None]:
    """Applies `on_cap` to a batch that is not full when the cap is reached. Returns the draws that fill it up, and a
    note for the user."""
    nothing: frozenset[int] = frozenset()
    if settings.dynamic_batch and batch.kept:
        return nothing, None
    found = f"{counted(batch.drawn, 'group')} drawn, {len(batch.kept)} of {batch.n} kept ({batch.reasons()})"
    same = [group for group, outcome in batch.dropped if outcome in ("all_correct", "all_wrong")]
    if different := sum(has_spread(group.verdicts) for group in same):
        found += f"; sampling.metric=score keeps {different} of these, whose scores differ"
    if settings.on_cap == "fill":
        spare = [group for group, outcome in batch.dropped if not OUTCOMES[outcome].signal]
        chosen = spare[: batch.missing]
        draws = frozenset(group.draw for group in chosen)
        batch.dropped = [entry for entry in batch.dropped if entry[0].draw not in draws]
        batch.kept = sorted([*batch.kept, *chosen], key=lambda group: group.draw)
        if batch.kept:
            return draws, f"sampling.cap reached: {found}; filled up with {counted(len(draws), 'uninformative group')}"
    if settings.on_cap == "partial" and batch.kept:
        return nothing, f"sampling.cap reached: {found}; training on {counted(len(batch.kept), 'group')}"
    raise CapReachedError(
        f"sampling.cap: {found}; raise sampling.cap, use easier or harder prompts, "
        "or choose sampling.on_cap=partial or fill"
    )
