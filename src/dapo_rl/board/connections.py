"""Connections of the board: how many there may be, and how long a client may take to send a request."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""From the connection, or the first byte of a further request, to the last byte of the request."""
MOST_CONNECTIONS, FEWEST_CONNECTIONS = 512, 16
ACCEPTED_AT_ONCE = 32
"""How many connections asyncio accepts before it handles any of them."""
SAY_EVERY_SECONDS = 60.0


def most_connections() -> int:
    """Half of the files that the process may open; the others are for reading runs."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files // 2 - ACCEPTED_AT_ONCE
    return max(FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, most))


class BoardProtocol(H11Protocol):
    """Closes a connection whose request does not come. When there are too many, the one that has kept the board waiting
    for longest makes room; if none does, the new one is closed."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= most_connections():
            waiting = [other for other in self.connections if isinstance(other, BoardProtocol) and other.is_waiting]
            if not waiting:
                transport.abort()
                return
            min(waiting, key=lambda other: other.since).transport.abort()
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_waiting:
            self._stop_waiting()
        elif self._deadline is None:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self.transport is not None:  # one that was closed at once was never made
            super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the request has not arrived completely."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _await_request(self) -> None:
        self.since = time.monotonic()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_late(self) -> None:
        self._deadline = None
        if self.is_waiting:
            self.transport.abort()


class LoopErrors:
    """Handles errors of the event loop: running out of files is one line a minute, not a traceback per connection."""

    def __init__(self) -> None:
        self._said = -SAY_EVERY_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" not in str(context.get("message")):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said >= SAY_EVERY_SECONDS:
            self._said = time.monotonic()
            why = getattr(context.get("exception"), "strerror", None) or "out of resources"
            print(f"board   connections wait: {why}; `ulimit -n` raises the limit", file=sys.stderr, flush=True)
