"""Groups in a sampler's state: entries of `sampler.json`. Their trajectories are saved in the order of the entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.base.saved import Count, Saved
from dapo_rl.codec import verdict_of, verdict_row
from dapo_rl.engines.protocol import Request
from dapo_rl.rewards.validation import fault_of
from dapo_rl.rollout.conversation import Conversation
from dapo_rl.rollout.in_flight import InFlightGroup
from dapo_rl.rollout.saved_episodes import SavedFlight
from dapo_rl.types import FinishReason, Group, Prompt, Trajectory, Verdict

FindPrompt = Callable[[str], Prompt]
FullRequest = Callable[[int, Prompt, int], Request]


def group_entry(group: Group, tokens: list[Trajectory]) -> dict[str, Any]:
    """Appends the samples to `tokens`, as the other entries do."""
    tokens += group.trajectories
    return {
        "draw": group.draw,
        "prompt": group.prompt.id,
        "finish_reasons": [sample.finish_reason for sample in group.samples],
        "verdicts": [verdict_row(verdict) for verdict in group.verdicts],
        "forks": len(group.forks),
    }


def flight_entry(flight: InFlightGroup, tokens: list[Trajectory]) -> dict[str, Any]:
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


def saved_verdict(row: dict[str, Any]) -> Verdict:
    try:
        verdict = verdict_of(row)
    except (AttributeError, TypeError) as error:
        raise ValueError(one_line(error)) from None
    if fault := fault_of(verdict):
        raise ValueError(fault.removeprefix("returned "))
    return verdict


class GroupEntry(Saved):
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
        verdicts = tuple(saved_verdict(row) for row in self.verdicts)
        return Group(self.draw, find(self.prompt), samples, verdicts, tuple(next(tokens) for _ in range(self.forks)))

    def fits(self, group_size: int) -> bool:
        return len(self.finish_reasons) == len(self.verdicts) == group_size


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
            verdict = None if each.verdict is None else saved_verdict(each.verdict)
            nothing = Trajectory.nothing(index)
            conversations.append(
                Conversation(f"restored-{whole.id}-{index}", index, whole.seed, nothing, forks=forks, verdict=verdict)
            )
        return conversations


class FlightEntry(Saved):
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
