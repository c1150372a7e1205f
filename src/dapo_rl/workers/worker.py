"""Workers: the processes in which a service answers calls, and the run's handle on them.

A message is a header (a magic number, the number of the call, a length) and a body.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dapo_rl.workers.limits import MAX_REPLY, ControlGroup, PrivateMemory
from dapo_rl.workers.processes import adopt_orphans, flush, reap

Result = TypeVar("Result")

READY = b"!"
REAP_CALLS = 256
"""Number of calls after which a worker reaps dead processes that it has adopted."""

_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"dapo"


class CorruptReplyError(Exception):
    """The data from the worker is not a valid reply. User code has access to the worker's end of the socket."""


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


def _nothing() -> None:
    """Loads nothing."""


@dataclass(frozen=True, slots=True)
class Service:
    """What workers do. It is forked, not pickled, so it may be made of anything."""

    answer: Callable[[bytearray, Callable[[], bool]], bytes]
    """The reply to a call, of at most MAX_REPLY bytes. The second argument tells whether memory is short: a reply that
    reports a failure should then ask for a new worker. It must not raise."""
    memory_mb: int
    """The limit on a worker's memory beyond what it shares with the fork server."""
    warm_up: Callable[[], None] = _nothing
    """Loads what takes long, once, in the fork server. The call that needs something reports if it cannot be loaded."""
    name: str = "verifier"
    """For messages."""
    section: str = "reward"
    """The section of the settings that has `workers` and `memory_mb`, for messages."""


class Worker:
    """The run's handle on a worker."""

    def __init__(self, pid: int, generation: int, channel: socket.socket) -> None:
        self.pid = pid
        self.generation = generation
        """The generation of its fork server."""
        self._channel = channel
        self._numbers = itertools.count(1)

    def call(self, body: bytes, limit_s: float, decode: Callable[[bytearray], Result]) -> Result:
        """Raises TimeoutError if there is no complete reply in time, EOFError if the worker died, CorruptReplyError."""
        deadline = time.monotonic() + limit_s
        number = next(self._numbers)
        try:
            self._channel.settimeout(limit_s)
            send(self._channel, number, body)
            while True:
                answered, reply = receive(self._channel, deadline, MAX_REPLY)
                if answered == number:
                    return decode(reply)
                if answered > number:
                    raise CorruptReplyError
                # A duplicate reply to an earlier call, from a copy of the worker: ignore it.
        except ConnectionError as error:
            raise EOFError(str(error)) from None

    def has_ended(self) -> bool:
        return is_closed(self._channel)

    def hang_up(self) -> None:
        # Another process forked from the run may hold a copy of the socket; shutdown closes it for all of them.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


def work(channel: socket.socket, service: Service, group: ControlGroup | None) -> None:
    """The main loop of a worker: replies to calls until the run closes the socket."""
    adopt_orphans()
    # If the machine runs out of memory, the kernel kills a worker, which is replaced, rather than the run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")
    memory = PrivateMemory(service.memory_mb << 20)
    own = os.getpid()
    unclaimed: set[int] = set()
    channel.sendall(READY)
    while True:
        try:
            number, body = receive(channel)
        except (EOFError, OSError):
            return
        reply = service.answer(body, memory.is_short)
        flush()
        if os.getpid() != own:  # a copy that user code forked and let return; only the worker itself replies
            os._exit(0)
        if group is not None and group.was_exceeded():  # by a child, whose death user code may mistake for a result
            os._exit(1)
        try:
            send(channel, number, reply)
        except OSError:  # user code closed the socket, or the run is gone
            os._exit(1)
        if number % REAP_CALLS == 0:
            unclaimed = reap(unclaimed)
