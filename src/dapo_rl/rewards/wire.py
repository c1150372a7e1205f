"""Calls of verifiers and their replies as bytes.

A call is a pickled prompt with its trajectories in the form of `codec`. A reply is JSON and is validated, since user
code has access to the worker's end of the socket.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dapo_rl.codec import from_bytes, to_bytes, verdict_of, verdict_row
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.rewards.validation import fault_of
from dapo_rl.types import Prompt, Trajectory, Verdict
from dapo_rl.workers.channel import CorruptReplyError


class Reply(NamedTuple):
    """The reply of a worker to a call."""

    kind: Literal["verdicts", "failed", "fatal"]
    """`failed`: no verdict on any sample; `fatal`: a `UserError` for the caller to raise."""
    verdicts: list[Verdict]
    error: tuple[str, str] = ("", "")
    """Without verdicts: what went wrong, as a line and further text below it."""
    exhausted: bool = False
    """The worker ran out of memory and still holds much of it, so it must be replaced."""

    @property
    def good(self) -> bool:
        return self.kind == "verdicts" and not any(verdict.failed for verdict in self.verdicts)


def encode_call(prompt: Prompt, samples: Sequence[Trajectory], state: RewardState = AT_START) -> bytes:
    return pickle.dumps((prompt, to_bytes(samples), state), pickle.HIGHEST_PROTOCOL)


def decode_call(data: bytearray) -> tuple[Prompt, Sequence[Trajectory], RewardState]:
    prompt, samples, state = pickle.loads(data)
    return prompt, from_bytes(samples), state


def encode_reply(reply: Reply) -> bytes:
    verdicts = [verdict_row(verdict) for verdict in reply.verdicts]
    return json.dumps((reply.kind, verdicts, reply.error, reply.exhausted), check_circular=False).encode()


def decode_reply(data: bytearray, count: int) -> Reply:
    """The reply to a call about `count` samples, or CorruptReplyError."""
    try:
        kind, rows, (line, more), exhausted = json.loads(data)
        verdicts = [verdict_of(row) for row in rows]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CorruptReplyError from None
    expected = count if kind == "verdicts" else 0
    if kind not in ("verdicts", "failed", "fatal") or len(verdicts) != expected or any(map(fault_of, verdicts)):
        raise CorruptReplyError
    return Reply(kind, verdicts, (str(line), str(more)), exhausted is True)
