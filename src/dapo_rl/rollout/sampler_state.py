"""The sampler's state between steps, or in a step that was interrupted: `sampler.json`, with the trajectories in
`trajectories.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dapo_rl.base.format import counted
from dapo_rl.base.saved import LARGEST, Count, Saved, parse_state, read_state, refuse, restoring, write_state
from dapo_rl.codec import verdict_row
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.batch_builder import PausedBatch, SampledBatch
from dapo_rl.rollout.dynamic_sampling import Grading
from dapo_rl.rollout.in_flight import Unread
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight, SavedStep
from dapo_rl.rollout.saved_groups import (
    FindPrompt,
    FlightEntry,
    FullRequest,
    GroupEntry,
    flight_entry,
    group_entry,
    saved_verdict,
)
from dapo_rl.rollout.trajectory_file import read_trajectories, trajectory_file, write_trajectories
from dapo_rl.types import Group, Trajectory

FILE = "sampler.json"
COUNTED = {
    "drawn": "drawn",
    "finished_tokens": "tokens_finished",
    "cancelled_tokens": "tokens_cancelled",
    "restarted_tokens": "tokens_restarted",
    **{name: name for name in ("generate_seconds", "verify_seconds", "earlier_seconds", "notes")},
}
"""The counters of a batch, by their names in the file."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    next_draw: int
    acceptance: Acceptance
    grading: Grading
    carried: tuple[Group, ...]
    """Good groups that wait for the next step, or in an interrupted one for earlier draws."""
    flights: tuple[SavedFlight, ...]
    """Groups whose episodes have not all ended, in the order in which they are resubmitted to the engine."""
    interrupted: PausedBatch | None = None
    order: tuple[str, ...] = ()
    """Requests of conversations, in the order in which they are resubmitted."""
    steps: tuple[SavedStep, ...] = ()
    restarted: Restarted = field(default_factory=Restarted)
    """Tokens of episodes that had to start again, and are not counted yet."""

    def write(self, directory: Path) -> None:
        """Tokens are in the order in which the entries name them."""
        tokens: list[Trajectory] = []
        state = {
            "next_draw": self.next_draw,
            "acceptance": self.acceptance.model_dump(),
            "grading": self.grading.model_dump(),
            "carried": [group_entry(group, tokens) for group in self.carried],
            "flights": [flight_entry(each.flight, tokens) for each in self.flights],
            "interrupted": None if self.interrupted is None else _interrupted_entry(self.interrupted, tokens),
            "order": list(self.order),
            "steps": [step.model_dump() for step in self.steps],
            "restarted": list(self.restarted),
        }
        write_state(directory / FILE, state)
        write_trajectories(directory, tokens)

    @classmethod
    def read(
        cls,
        directory: Path,
        find: FindPrompt,
        request: FullRequest,
        group_size: int,
        longest: int,
        vocabulary: int,
    ) -> SamplerState:
        """`find` returns the prompt with an id, `request` the full request of a draw."""
        with restoring(directory / FILE):
            state = parse_state(SavedSampler, read_state(directory / FILE))
            refuse(state.misfits(group_size))
        with restoring(trajectory_file(directory)):
            found = read_trajectories(directory, longest, vocabulary)
            if len(found) != state.samples:
                raise ValueError(f"it has {counted(len(found), 'sample')} instead of {state.samples}")
            tokens = iter(found)
        with restoring(directory / FILE):
            carried = tuple(entry.restored(find, tokens) for entry in state.carried)
            flights = tuple(entry.restored(find, request, tokens) for entry in state.flights)
            entry = state.interrupted
            interrupted = None if entry is None else entry.restored(find, request, tokens, carried)
        more = (tuple(state.order), tuple(state.steps), state.restarted)
        return cls(state.next_draw, state.acceptance, state.grading, carried, flights, interrupted, *more)


def _interrupted_entry(interrupted: PausedBatch, tokens: list[Trajectory]) -> dict[str, Any]:
    batch = interrupted.batch
    return {
        "kept": [group_entry(group, tokens) for group in batch.kept],
        "dropped": [group_entry(group, tokens) | {"fate": outcome} for group, outcome in batch.dropped],
        "rejected": [group_entry(group, tokens) | {"fate": outcome} for group, outcome in interrupted.rejected],
        "unread": [_unread_entry(unread, tokens) for unread in interrupted.unread],
        "sampled": [group.draw for group in batch.sampled],
        **{name: getattr(batch, own) for name, own in COUNTED.items()},
    }


def _unread_entry(unread: Unread, tokens: list[Trajectory]) -> dict[str, Any]:
    verdicts = None if unread.verdicts is None else [verdict_row(verdict) for verdict in unread.verdicts]
    return flight_entry(unread.flight, tokens) | {"polls": unread.polls, "verdicts": verdicts}


_Seconds = Annotated[float, Field(ge=0, le=1e12)]


class _Rejected(GroupEntry):
    outcome: Annotated[Outcome, BeforeValidator(lambda outcome: "surplus" if outcome == "stale" else outcome)] = Field(
        alias="fate"
    )
    """Older versions also dropped groups for their age."""


class _Unread(FlightEntry):
    polls: Count
    verdicts: list[dict[str, Any]] | None

    def fits(self, group_size: int) -> bool:
        judged = self.verdicts is None or len(self.verdicts) == group_size
        return super().fits(group_size) and self.is_whole and judged


class _Interrupted(Saved):
    kept: list[GroupEntry]
    dropped: list[_Rejected]
    rejected: list[_Rejected]
    unread: list[_Unread]
    sampled: list[Count]
    drawn: Count
    finished_tokens: Annotated[int, Field(gt=-LARGEST, lt=LARGEST)]
    """In checkpoints of older versions, below 0 if more finished tokens of earlier steps were cancelled than this step
    has generated."""
    cancelled_tokens: Count
    restarted_tokens: Count = 0
    generate_seconds: _Seconds
    verify_seconds: _Seconds
    earlier_seconds: _Seconds
    notes: list[str]

    @property
    def judged(self) -> list[GroupEntry]:
        return [*self.kept, *self.dropped, *self.rejected]

    def restored(
        self, find: FindPrompt, request: FullRequest, tokens: Iterator[Trajectory], carried: Sequence[Group]
    ) -> PausedBatch:
        kept = [entry.restored(find, tokens) for entry in self.kept]
        dropped = [(entry.restored(find, tokens), entry.outcome) for entry in self.dropped]
        rejected = tuple((entry.restored(find, tokens), entry.outcome) for entry in self.rejected)
        unread = []
        for entry in self.unread:
            verdicts = None if entry.verdicts is None else tuple(saved_verdict(row) for row in entry.verdicts)
            unread.append(Unread(entry.restored(find, request, tokens).flight, entry.polls, verdicts))
        judged = [*carried, *kept, *(group for group, _ in (*dropped, *rejected))]
        by_draw = {group.draw: group for group in judged}
        batch = SampledBatch(
            kept,
            dropped,
            [by_draw[draw] for draw in self.sampled],
            **{own: getattr(self, name) for name, own in COUNTED.items()},
        )
        return PausedBatch(batch, rejected, tuple(unread))


class SavedSampler(Saved):
    next_draw: Count
    acceptance: Acceptance
    grading: Grading = Grading()
    carried: list[GroupEntry]
    flights: list[FlightEntry]
    interrupted: _Interrupted | None = None
    order: list[str] = Field(default_factory=list)
    steps: list[SavedStep] = Field(default_factory=list)
    restarted: Restarted = Restarted()

    @property
    def judged(self) -> list[GroupEntry]:
        return [*self.carried, *(self.interrupted.judged if self.interrupted else [])]

    @property
    def entries(self) -> list[GroupEntry | FlightEntry]:
        return [*self.judged, *self.flights, *(self.interrupted.unread if self.interrupted else [])]

    @property
    def samples(self) -> int:
        return sum(entry.samples for entry in self.entries)

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        kept, seen = self.acceptance.overall
        rates = [(kept, seen), *self.acceptance.sources.values()]
        yield "acceptance", seen < 1e-3 or any(kept > seen for kept, seen in rates)
        draws = [entry.draw for entry in self.entries]
        episodes = {entry.draw: len(entry.episodes.conversations) for entry in self.flights if entry.episodes}
        yield "steps", not all((step.index or 0) < episodes.get(step.draw, 0) for step in self.steps)
        yield "next_draw", len(set(draws)) < len(draws) or max(draws, default=-1) >= self.next_draw
        if self.interrupted:
            sampled = self.interrupted.sampled
            judged = {entry.draw for entry in self.judged}
            yield "interrupted.sampled", len(set(sampled)) < len(sampled) or not judged.issuperset(sampled)
            yield "interrupted.rejected", any(entry.outcome == "kept" for entry in self.interrupted.rejected)
            yield "interrupted.dropped", any(entry.outcome == "kept" for entry in self.interrupted.dropped)

    def misfits(self, group_size: int) -> Iterable[tuple[str, bool]]:
        """Entries that do not fit a run with groups of this size."""
        yield "carried", not all(entry.fits(group_size) for entry in self.carried)
        yield "flights", not all(entry.fits(group_size) and not entry.is_whole for entry in self.flights)
        if self.interrupted:
            yield "interrupted", not all(entry.fits(group_size) for entry in self.entries)
