"""Unfinished groups of a checkpoint, and how their environments are brought back to where they were."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from dapo_rl.base.saved import Count, Saved
from dapo_rl.rollout.conversation import Conversation, Conversations
from dapo_rl.rollout.in_flight import InFlightGroup
from dapo_rl.types import FinishReason, Trajectory

R = TypeVar("R")


class SavedStep(Saved):
    """An episode that was with its environment when a checkpoint was written."""

    draw: Count
    index: Count | None
    """None: the environments of the group were being opened."""
    polls: Count
    """Engine polls since then."""


class Restarted(NamedTuple):
    """Tokens of episodes that had to start again: in turns that had ended, and in others."""

    finished: Count = 0
    partial: Count = 0


@dataclass(frozen=True, slots=True)
class SavedFlight:
    """An unfinished group of a checkpoint."""

    flight: InFlightGroup
    partial: tuple[Trajectory, ...] = ()
    """The tokens of its conversations that have begun, also of the turn that the engine was writing."""
    ends: Mapping[int, tuple[FinishReason, bool]] = field(default_factory=dict)
    """Conversations that a limit has ended, whose last reward is missing: which limit, and whether it cut the turn."""

    def replay(self, conversations: Conversations, pending: dict[tuple[int, int], Future[Any] | None]) -> Restarted:
        """Brings the environments back to where they were, all at once. Adds the answers that are missing to `pending`.
        Returns the tokens of episodes that start again."""
        flight = self.flight
        saved = {sample.index: sample for sample in self.partial}
        with_engine = {index for request in flight.turns.values() for index in request.indices}
        open_ones = [
            c for c in flight.conversations if c.verdict is None and (c.index in saved or c.index in with_engine)
        ]
        requests, flight.turns = flight.turns, {}
        replays = {
            c.index: conversations.replay(
                c, flight.prompt, saved.get(c.index), c.index in with_engine, self.ends.get(c.index)
            )
            for c in open_ones
        }
        lost: list[Conversation] = []
        for conversation, (is_same, answer) in zip(open_ones, replay_all(replays.values()), strict=True):
            if is_same:
                pending[flight.draw, conversation.index] = answer
            else:
                lost.append(conversation)
        gone = {conversation.index for conversation in lost}
        for name, request in requests.items():
            begun = tuple(saved[sample.index] for sample in request.partial if sample.index not in gone)
            new = tuple(index for index in request.starting if index not in gone)
            if begun or new:
                index = begun[0].index if begun else new[0]
                like = conversations.request(flight.conversations[index], flight.request)
                flight.turns[name] = replace(like, id=name, partial=begun, new=new)
        finished = partial = 0
        for conversation in lost:
            tokens = saved.get(conversation.index, Trajectory.nothing(0))
            ended = tokens.until(max((turn.end for turn in tokens.turns), default=0)).written
            finished += ended + sum(fork.written for fork in conversation.forks)
            partial += tokens.written - ended
        for conversation, first in zip(lost, conversations.restart(lost, flight.prompt, flight.request), strict=True):
            if first is None:
                flight.samples[conversation.index] = conversation.trajectory
            else:
                flight.turns[first.id] = first
        return Restarted(finished, partial)


def replay_all(replays: Iterable[Generator[Future[Any], Any, R]]) -> list[R]:
    """Runs replays side by side."""
    running = list(replays)
    results: list[Any] = [None] * len(running)
    values: dict[int, Any] = dict.fromkeys(range(len(running)))
    while values:
        calls: dict[int, Future[Any]] = {}
        for number, value in values.items():
            try:
                calls[number] = running[number].send(value)
            except StopIteration as end:
                results[number] = end.value
        values = {number: call.result() for number, call in calls.items()}
    return results
