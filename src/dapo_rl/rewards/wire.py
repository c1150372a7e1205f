"""The protocol between the run and a worker.

A message is a header (a magic number, the number of the call, a length) and a body. A call is a pickled prompt with its
trajectories in the form of `codec`. A reply is JSON and is validated, since user code has access to the worker's end of
the socket.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dapo_rl.codec import from_bytes, to_bytes, verdict_of, verdict_row
from dapo_rl.rewards.judge import fault_of
from dapo_rl.rewards.state import AT_START, RewardState
from dapo_rl.types import Prompt, Trajectory, Verdict

_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"dapo"
MAX_REPLY = 64 << 20
"""Size limit of a reply in bytes; sixteen verdicts usually take a few kilobytes."""


class CorruptReplyError(Exception):
    """The data from the worker is not a valid reply."""


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


def send(channel: socket.socket, call: int, body: bytes) -> None:
    channel.sendall(_HEADER.pack(_MAGIC, call, len(body)) + body)


def receive(channel: socket.socket, deadline: float | None = None, limit: int | None = None) -> tuple[int, bytearray]:
    """The number of a call and the body. Raises EOFError, TimeoutError, or CorruptReplyError."""
    magic, call, length = _HEADER.unpack(read_exactly(channel, _HEADER.size, deadline))
    if magic != _MAGIC or (limit is not None and length > limit):
        raise CorruptReplyError
    return call, read_exactly(channel, length, deadline)


def read_exactly(channel: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), 1e-4))
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def is_closed(channel: socket.socket) -> bool:
    """Whether the other end is closed, without waiting."""
    channel.settimeout(0)
    try:
        return channel.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
