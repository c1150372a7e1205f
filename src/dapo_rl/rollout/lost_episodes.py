"""Replays deterministic episodes whose processes or nodes were lost, so that a run goes on as if they had not been."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any

from dapo_rl.envs.protocol import EpisodeFailure
from dapo_rl.rollout.conversation import Conversation, Conversations, Result
from dapo_rl.rollout.pending_steps import Step
from dapo_rl.rollout.saved_episodes import replay_all


def replay_lost(
    conversations: Conversations, asked: Sequence[Step], answers: Sequence[Sequence[Any]]
) -> list[Sequence[Any]]:
    """The answers, with those of replayed episodes in place of what was lost. Replays run side by side; what is lost
    again, or answers otherwise than before, stays lost."""
    found = [list(results) for results in answers]
    if not conversations.pool.deterministic:
        return [*found]
    places, replays = [], []
    for each, results in zip(asked, found, strict=True):
        own = each.flight.conversations if each.conversation is None else [each.conversation]
        for at, (conversation, result) in enumerate(zip(own, results, strict=True)):
            if isinstance(result, EpisodeFailure) and result.reason == "lost":
                places.append((results, at))
                replays.append(_replay(conversations, conversation, each, result))
    for (results, at), result in zip(places, replay_all(replays), strict=True):
        results[at] = result
    return [*found]


def _replay(
    conversations: Conversations, conversation: Conversation, asked: Step, lost: EpisodeFailure
) -> Generator[Future[Any], Any, Result]:
    """Brings a new episode to where the lost one was. Returns what the environment says next."""
    prompt = asked.flight.prompt
    new = conversations.fresh(conversation.index, conversation.seed)
    if asked.conversation is None:
        result: Result = yield conversations.open(new, prompt)
        conversations.close([conversation])
        conversation.key = new.key
        return result
    ends = None if conversation.ends is None else (conversation.ends, conversation.cut)
    is_same, answer = False, None
    if not conversation.forks:
        is_same, answer = yield from conversations.replay(new, prompt, conversation.trajectory, False, ends)
    if not is_same or answer is None:
        conversations.close([new])
        return lost
    result = yield answer
    conversations.close([conversation])
    conversation.become(new)
    return result
