"""The server of the board: sockets, limits on connections, and how it starts and ends."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dapo_rl.board.access import is_loopback
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app
from dapo_rl.board.watcher import Watcher
from dapo_rl.errors import UserError

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


class Server(uvicorn.Server):
    """Ends live connections first; uvicorn would wait for them and report each as an error."""

    def __init__(self, settings: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(settings)
        self._watcher = watcher

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watcher.close()
        await super().shutdown(sockets)


def serve(runs: Sequence[Path], host: str, port: int, allow_runs: bool = False) -> None:
    """Serves until Ctrl-C. Beyond this machine the board is read-only unless `allow_runs` is set."""
    roots = list(runs)
    workshop = next((root for root in roots if not (root / "config.yaml").is_file()), Path("runs"))
    if workshop not in roots:
        roots.append(workshop)
    is_local = is_loopback(host)
    lab = Launcher(workshop, roots) if is_local or allow_runs else None
    token = secrets.token_urlsafe(18)
    app = create_app(Catalogue(roots), lab, token, host)
    listening = _listen(host, port)
    _announce(host, listening.getsockname()[1], token, lab is not None, roots)
    settings = uvicorn.Config(
        app,
        http=BoardProtocol,
        ws="none",
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
        log_level="error",  # a warning per malformed request would let anyone fill the disk
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the Lab's runs are stopped first
    try:
        Server(settings, app.state.watcher).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        if lab is not None:
            if any(job["state"] in ("running", "stopping") for job in lab.queue.listed()):
                print("stopping the runs of the Lab; each saves first", flush=True)
            lab.queue.close()


def _announce(host: str, port: int, token: str, has_lab: bool, roots: Sequence[Path]) -> None:
    is_local = is_loopback(host)
    name = host if is_local else _reachable(host)
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}/"
    # Browsers do not send the part after a #; beyond this machine the server needs to see the token.
    print(f"board   {address}{'#' if is_local else '?'}token={token}", flush=True)
    need = "to read the board" if not has_lab else "to start and stop runs" if is_local else "to read and to start runs"
    print(f"token   {token}   (needed {need}; included in the address above)", flush=True)
    if not is_local:
        print("access  not encrypted: anyone with the address can read the runs", end="", flush=True)
        print(" and start and stop them" if has_lab else "; nobody can start or stop any (--allow-runs)", flush=True)
    print(f"runs    {', '.join(str(root) for root in roots)}   (Ctrl-C ends the board)", flush=True)


def _reachable(host: str) -> str:
    """An address of this machine for a board that listens on all of them."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # finds the route; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return host


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # before the address is printed, so that early connections wait instead of failing
    except (OSError, OverflowError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"board: {host}:{port}: {why}; name another with --port; 0 picks a free one") from None
    return listening
