"""Messages between the run and a worker: a header (a magic number, the number of the call, a length) and a body."""

from __future__ import annotations

import socket
import struct
import time

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
