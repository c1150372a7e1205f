"""The sampler's state between steps, or in a step that was interrupted: `sampler.json`, with the trajectories in
`trajectories.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dapo_rl.base.format import counted
from dapo_rl.base.quote import one_line
from dapo_rl.base.saved import (
    LARGEST,
    Count,
    Saved,
    parse_state,
    read_state,
    refuse,
    restoring,
    write_state,
)
from dapo_rl.codec import verdict_of, verdict_row
from dapo_rl.engines.protocol import Request
from dapo_rl.outcomes import Former, Outcome
from dapo_rl.rewards.validation import fault_of
from dapo_rl.rollout.acceptance_rate import Acceptance
from dapo_rl.rollout.batch_builder import PausedBatch, SampledBatch
from dapo_rl.rollout.conversation import Conversation
from dapo_rl.rollout.dynamic_sampling import Grading
from dapo_rl.rollout.in_flight import InFlightGroup, Unread
from dapo_rl.rollout.saved_episodes import Restarted, SavedFlight, SavedStep
from dapo_rl.rollout.trajectory_file import read_trajectories, trajectory_file, write_trajectories
from dapo_rl.types import FinishReason, Group, Prompt, Trajectory, Verdict

FILE = "sampler.json"
COUNTED = {
    "drawn": "drawn",
    "finished_tokens": "tokens_finished",
    "cancelled_tokens": "tokens_cancelled",
    "restarted_tokens": "tokens_restarted",
    **{name: name for name in ("generate_seconds", "verify_seconds", "earlier_seconds", "notes")},
}
"""What a batch has counted, by its name in the file."""
FindPrompt = Callable[[str], Prompt]
FullRequest = Callable[[int, Prompt, int], Request]


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
            "carried": [_group_entry(group, tokens) for group in self.carried],
            "flights": [_flight_entry(each.flight, tokens) for each in self.flights],
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


def _group_entry(group: Group, tokens: list[Trajectory]) -> dict[str, Any]:
    """Appends the samples to `tokens`, as the other entries do."""
    tokens += group.trajectories
    return {
        "draw": group.draw,
        "prompt": group.prompt.id,
        "finish_reasons": [sample.finish_reason for sample in group.samples],
        "verdicts": [verdict_row(verdict) for verdict in group.verdicts],
        "forks": len(group.forks),
    }


def _flight_entry(flight: InFlightGroup, tokens: list[Trajectory]) -> dict[str, Any]:
    arrived = [(index, sample) for index, sample in enumerate(flight.samples) if sample is not None]
    begun = [*_begun(flight)] if flight.conversations else [p for r in flight.turns.values() for p in r.partial]
    new = [] if flight.conversations else [index for r in flight.turns.values() for index in r.starting]
    tokens += [*(sample for _, sample in arrived), *begun]
    entry = {
        "draw": flight.draw,
        "prompt": flight.prompt.id,
        "version": flight.version,
        "arrived": [index for index, _ in arrived],
        "finish_reasons": [sample.finish_reason for _, sample in arrived],
        "begun": [sample.index for sample in begun],
        "new": new,
    }
    return entry | ({"episodes": _episodes_entry(flight, tokens)} if flight.conversations else {})


def _begun(flight: InFlightGroup) -> Iterator[Trajectory]:
    """Conversations that have tokens and have not ended, with the tokens that the engine has added."""
    partial = {sample.index: sample for request in flight.turns.values() for sample in request.partial}
    for conversation in flight.conversations:
        own = conversation.trajectory
        if conversation.verdict is None and (sample := partial.get(conversation.index, own)) and len(sample.token_ids):
            yield sample.replace(
                index=own.index, turns=own.turns, messages=own.messages, prompt_ids=own.prompt_ids, finish_reason=None
            )


def _episodes_entry(flight: InFlightGroup, tokens: list[Trajectory]) -> dict[str, Any]:
    requests = [
        {"id": name, "begun": [sample.index for sample in request.partial], "new": list(request.starting)}
        for name, request in flight.turns.items()
    ]
    rows = []
    for conversation in flight.conversations:
        tokens += conversation.forks
        cut = conversation.ends is not None and conversation.cut
        verdict = None if conversation.verdict is None else verdict_row(conversation.verdict)
        rows.append({"verdict": verdict, "forks": len(conversation.forks), "ends": conversation.ends, "cut": cut})
    return {"requests": requests, "conversations": rows}


def _interrupted_entry(interrupted: PausedBatch, tokens: list[Trajectory]) -> dict[str, Any]:
    batch = interrupted.batch
    return {
        "kept": [_group_entry(group, tokens) for group in batch.kept],
        "dropped": [_group_entry(group, tokens) | {"fate": outcome} for group, outcome in batch.dropped],
        "rejected": [_group_entry(group, tokens) | {"fate": outcome} for group, outcome in interrupted.rejected],
        "unread": [_unread_entry(unread, tokens) for unread in interrupted.unread],
        "sampled": [group.draw for group in batch.sampled],
        **{name: getattr(batch, own) for name, own in COUNTED.items()},
    }


def _unread_entry(unread: Unread, tokens: list[Trajectory]) -> dict[str, Any]:
    verdicts = None if unread.verdicts is None else [verdict_row(verdict) for verdict in unread.verdicts]
    return _flight_entry(unread.flight, tokens) | {"polls": unread.polls, "verdicts": verdicts}


_Seconds = Annotated[float, Field(ge=0, le=1e12)]


def _verdict(row: dict[str, Any]) -> Verdict:
    try:
        verdict = verdict_of(row)
    except (AttributeError, TypeError) as error:
        raise ValueError(one_line(error)) from None
    if fault := fault_of(verdict):
        raise ValueError(fault.removeprefix("returned "))
    return verdict


class _Group(Saved):
    draw: Count
    prompt: str
    finish_reasons: list[FinishReason]
    verdicts: list[dict[str, Any]]
    forks: Count = 0

    @property
    def samples(self) -> int:
        return len(self.finish_reasons) + self.forks

    def restored(self, find: FindPrompt, tokens: Iterator[Trajectory]) -> Group:
        samples = tuple(next(tokens).replace(finish_reason=reason) for reason in self.finish_reasons)
        verdicts = tuple(_verdict(row) for row in self.verdicts)
        return Group(self.draw, find(self.prompt), samples, verdicts, tuple(next(tokens) for _ in range(self.forks)))

    def fits(self, group_size: int) -> bool:
        return len(self.finish_reasons) == len(self.verdicts) == group_size


class _Rejected(_Group):
    outcome: Outcome | Former = Field(alias="fate")

    @property
    def current_outcome(self) -> Outcome:
        return "surplus" if self.outcome == "stale" else self.outcome


class _Request(Saved):
    id: str
    begun: list[Count]
    new: list[Count]


class _Conversation(Saved):
    verdict: dict[str, Any] | None
    forks: Count
    ends: FinishReason | None
    cut: bool


class _Episodes(Saved):
    requests: list[_Request]
    conversations: list[_Conversation]

    @property
    def samples(self) -> int:
        return sum(each.forks for each in self.conversations)

    def fits(self, arrived: list[int], begun: list[int]) -> bool:
        """Whether it says the same of its group's samples as the group."""
        everyone = range(len(self.conversations))
        requested = [index for request in self.requests for index in (*request.begun, *request.new)]
        ended = [index for index, each in enumerate(self.conversations) if each.verdict is not None]
        partial = {index for request in self.requests for index in request.begun}
        apart = len({*requested}) == len(requested) and {*requested} <= {*everyone} - {*ended}
        return apart and ended == sorted(arrived) and partial <= {*begun} <= {*everyone} - {*ended}

    def restored(self, whole: Request, tokens: Iterator[Trajectory]) -> list[Conversation]:
        conversations = []
        for index, each in enumerate(self.conversations):
            forks = [next(tokens) for _ in range(each.forks)]
            verdict = None if each.verdict is None else _verdict(each.verdict)
            nothing = Trajectory.nothing(index)
            conversations.append(
                Conversation(f"restored-{whole.id}-{index}", index, whole.seed, nothing, forks=forks, verdict=verdict)
            )
        return conversations


class _Flight(Saved):
    draw: Count
    prompt: str
    version: Count
    arrived: list[Count]
    finish_reasons: list[FinishReason]
    begun: list[Count]
    new: list[Count]
    episodes: _Episodes | None = None
    """With an environment."""

    @property
    def samples(self) -> int:
        return len(self.arrived) + len(self.begun) + (self.episodes.samples if self.episodes else 0)

    @property
    def is_whole(self) -> bool:
        if self.episodes is not None:
            return len(self.arrived) == len(self.episodes.conversations)
        return not self.begun and not self.new

    def restored(self, find: FindPrompt, request: FullRequest, tokens: Iterator[Trajectory]) -> SavedFlight:
        prompt = find(self.prompt)
        whole = request(self.draw, prompt, self.version)
        samples: list[Trajectory | None] = [None] * whole.count
        for index, reason in zip(self.arrived, self.finish_reasons, strict=True):
            samples[index] = next(tokens).replace(finish_reason=reason)
        begun = tuple(next(tokens).replace(index=index) for index in self.begun)
        flight = InFlightGroup(self.draw, prompt, self.version, whole, samples)
        if self.episodes is None:
            if not self.is_whole:
                flight.turns[whole.id] = replace(whole, partial=begun, new=tuple(self.new))
            return SavedFlight(flight)
        flight.conversations = self.episodes.restored(whole, tokens)
        for sample, conversation in zip(samples, flight.conversations, strict=True):
            if sample is not None:
                conversation.trajectory = sample
        partial = {sample.index: sample for sample in begun}
        for saved in self.episodes.requests:
            continued = tuple(partial[index] for index in saved.begun)
            flight.turns[saved.id] = replace(whole, id=saved.id, partial=continued, new=tuple(saved.new))
        ends = {i: (e.ends, e.cut) for i, e in enumerate(self.episodes.conversations) if e.ends and e.verdict is None}
        return SavedFlight(flight, begun, ends)

    def fits(self, group_size: int) -> bool:
        if len(self.arrived) != len(self.finish_reasons):
            return False
        if self.episodes is not None:
            whole = len(self.episodes.conversations) == group_size
            return whole and self.episodes.fits(self.arrived, self.begun)
        return sorted([*self.arrived, *self.begun, *self.new]) == list(range(group_size))


class _Unread(_Flight):
    polls: Count
    verdicts: list[dict[str, Any]] | None

    def fits(self, group_size: int) -> bool:
        judged = self.verdicts is None or len(self.verdicts) == group_size
        return super().fits(group_size) and self.is_whole and judged


class _Interrupted(Saved):
    kept: list[_Group]
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
    def judged(self) -> list[_Group]:
        return [*self.kept, *self.dropped, *self.rejected]

    def restored(
        self, find: FindPrompt, request: FullRequest, tokens: Iterator[Trajectory], carried: Sequence[Group]
    ) -> PausedBatch:
        kept = [entry.restored(find, tokens) for entry in self.kept]
        dropped = [(entry.restored(find, tokens), entry.current_outcome) for entry in self.dropped]
        rejected = tuple((entry.restored(find, tokens), entry.current_outcome) for entry in self.rejected)
        unread = []
        for entry in self.unread:
            verdicts = None if entry.verdicts is None else tuple(_verdict(row) for row in entry.verdicts)
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
    carried: list[_Group]
    flights: list[_Flight]
    interrupted: _Interrupted | None = None
    order: list[str] = Field(default_factory=list)
    steps: list[SavedStep] = Field(default_factory=list)
    restarted: Restarted = Restarted()

    @property
    def judged(self) -> list[_Group]:
        return [*self.carried, *(self.interrupted.judged if self.interrupted else [])]

    @property
    def entries(self) -> list[_Group | _Flight]:
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
