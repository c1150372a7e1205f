"""The processes that fork workers.

A *fork server* is a single-threaded process with the verifier loaded, from which workers can be forked at any time.
The run itself, with its threads and its GPU, cannot fork them. Forking passes on the verifier as it is, including
closures and open files.

Fork servers are forked by a *keeper*, which the run forks once, early. The keeper runs no user code, so it can fork a
clean fork server when one dies.

    run ── keeper ── fork server ── worker, worker, …

Each of them adopts orphans among its descendants: whatever a worker starts, even a daemon, is killed with the worker
or after it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable

from dapo_rl.errors import UserError
from dapo_rl.rewards import control_group, processes, shared_memory
from dapo_rl.rewards.control_group import ControlGroup, ControlGroups
from dapo_rl.rewards.wire import read_exactly
from dapo_rl.rewards.worker import READY, Worker, work
from dapo_rl.types import Verifier

_REQUEST = struct.Struct("<cq")
_NEW, _KILL = b"+", b"-"
"""Requests. To the keeper: fork a fork server for the attached socket. To a fork server: fork a worker for the
attached socket, or kill a worker."""
_REPLY = struct.Struct("<q")

START_S = 60.0
"""Time for a worker to start on a busy machine."""
MAX_DEATHS = 4
"""The run stops after this many fork servers died in a row, without a successful call in between."""
WATCH_S = 0.25
"""Interval between checks whether workers are alive and how much memory they share."""
OUT_OF_SHARED_MEMORY, OUT_OF_MEMORY = -1, -2
"""Returned instead of the wait status of a worker that its fork server, or the kernel, killed for its memory."""
SLACK = 32 << 20
"""Allowance of a control group beyond its limit, for page tables and the like."""


class ForkServerGoneError(Exception):
    """The fork server has ended, with its workers; `spawn` starts another one."""


class WorkerDiedError(Exception):
    """A new worker died before it was ready."""


class ForkServer:
    """The run's handle on the keeper and the current fork server. Its methods are thread-safe."""

    def __init__(self, verifier: Verifier, memory_mb: int, wrong: float) -> None:
        self._lock = threading.Lock()
        self._keeper, theirs = socket.socketpair()
        self._server: socket.socket | None = None
        self._generation = 0
        self._deaths = 0
        self.pid = 0
        """Process id of the fork server."""
        run = os.getpid()
        self._groups = control_group.find()
        processes.flush()  # otherwise buffered output is written twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns if the run already has threads
            self.keeper_pid = os.fork()
        if self.keeper_pid == 0:
            with processes.ends_here():
                self._keeper.close()
                _keep(theirs, verifier, memory_mb << 20, wrong, run, self._groups)
        theirs.close()
        self._start()

    def spawn(self) -> Worker:
        """A new worker, from a new fork server if the last one has ended. Raises UserError if they keep ending."""
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                if self._server is None:
                    self._start()
                pid, generation = self._ask(_NEW, 0, theirs), self._generation
            if pid < 0:
                raise OSError(-pid, f"a worker for the verifier cannot be forked: {os.strerror(-pid)}")
            worker = Worker(pid, generation, ours)
            ours.settimeout(START_S)
            if ours.recv(1) != READY:  # wait here, so that its start does not count towards the first call's time
                self.kill(worker)
                raise WorkerDiedError
        except BaseException:
            ours.close()
            raise
        return worker

    def kill(self, worker: Worker) -> int:
        """Kills the worker and everything that it started; returns its wait status or a substitute."""
        worker.hang_up()
        with self._lock:
            if worker.generation != self._generation:
                raise ForkServerGoneError
            return self._ask(_KILL, worker.pid)

    def call_went_well(self) -> None:
        """Resets the count of fork servers that died in a row."""
        self._deaths = 0

    def check(self) -> None:
        """Raises UserError if fork servers keep dying."""
        if self._deaths >= MAX_DEATHS:
            raise self._error()

    def close(self, patience_s: float = 3.0) -> None:
        """Ends the keeper, which kills all of its descendants."""
        with contextlib.suppress(OSError):
            self._keeper.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.keeper_pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self.keeper_pid, signal.SIGKILL)
                time.sleep(0.002)
        self._groups.remove(self.keeper_pid)  # in case the keeper itself was killed
        self._keeper.close()

    def _start(self) -> None:
        self.check()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = _request(self._keeper, _NEW, 0, theirs)
        except (OSError, EOFError):
            ours.close()
            raise self._error() from None
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"the verifier's processes cannot be forked: {os.strerror(-pid)}")
        self._server, self.pid = ours, pid

    def _ask(self, request: bytes, pid: int, end: socket.socket | None = None) -> int:
        try:
            if self._server is None:
                raise EOFError
            return _request(self._server, request, pid, end)
        except (OSError, EOFError):
            if self._server is not None:
                self._server.close()
                self._server = None
                self._generation += 1
                self._deaths += 1
            raise ForkServerGoneError from None

    def _error(self) -> UserError:
        return UserError(
            f"reward.verifier: the process that forks its workers (pid {self.pid}) has ended; "
            "if the system ran out of memory, lower reward.workers or reward.memory_mb"
        )


def _request(channel: socket.socket, request: bytes, pid: int, end: socket.socket | None) -> int:
    message = _REQUEST.pack(request, pid)
    if end is None:
        channel.sendall(message)
    else:
        socket.send_fds(channel, [message], [end.fileno()])
    return _REPLY.unpack(read_exactly(channel, _REPLY.size))[0]  # type: ignore[no-any-return]


def _keep(
    control: socket.socket, verifier: Verifier, memory: int, wrong: float, run: int, groups: ControlGroups
) -> None:
    """The main loop of the keeper: forks fork servers on request, until the run closes the socket or ends."""
    processes.settle()
    processes.adopt_orphans()
    gc.freeze()
    control.settimeout(WATCH_S)
    keeper, server = os.getpid(), 0
    groups.remove_abandoned()

    def clean_up() -> None:
        processes.kill_children()
        groups.remove(keeper)

    def serve(end: socket.socket) -> None:
        processes.die_with(keeper)
        control.close()
        _serve(end, verifier, memory, wrong, keeper, groups)

    try:
        while os.getppid() == run:
            try:
                message, ends, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            except TimeoutError:
                if server > 0 and processes.has_ended(server):
                    # Leftover children of its workers may hold copies of sockets on whose end the run waits.
                    clean_up()
                    server = 0
                continue
            if len(message) < _REQUEST.size:
                break
            clean_up()
            server = _fork(serve, ends[0])
            control.sendall(_REPLY.pack(server))
    except ConnectionError:
        pass
    finally:
        clean_up()


def _serve(
    control: socket.socket, verifier: Verifier, memory: int, wrong: float, keeper: int, groups: ControlGroups
) -> None:
    """The main loop of a fork server: forks and kills workers, until the run closes the socket."""
    processes.adopt_orphans()
    server = os.getpid()
    _warm_up(verifier)
    if os.getpid() != server:  # a copy that the verifier forked and let return
        return
    gc.freeze()  # so that garbage collection in a worker does not copy shared pages
    workers = _Workers(memory)

    def new(end: int) -> int:
        group = groups.new(keeper, workers.group_limit)
        return workers.add(_fork(functools.partial(start, group), end), group)

    def start(group: ControlGroup | None, end: socket.socket) -> None:
        processes.die_with(server)
        if group is not None:
            group.enter()
        control.close()
        # A process group of its own, set by both sides, since either may run first.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        work(end, verifier, memory, wrong, group)

    with contextlib.suppress(ConnectionError):
        while os.getppid() == keeper:
            control.settimeout(workers.watch())
            try:
                message, ends, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            except TimeoutError:
                continue
            if len(message) < _REQUEST.size:
                break
            request, pid = _REQUEST.unpack(message)
            reply = new(ends[0]) if request == _NEW else workers.kill(pid)
            control.sendall(_REPLY.pack(reply))


def _warm_up(verifier: Verifier) -> None:
    """Loads what takes long. The call that needs something reports if it cannot be loaded."""
    with contextlib.suppress(BaseException):
        if its_own := getattr(verifier, "warm_up", None):
            its_own()


class _Workers:
    """The workers of this fork server."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._inherited = shared_memory.mapped_files()
        self.group_limit = memory + SLACK + processes.private_bytes() + sum(self._inherited.values())
        """In bytes. A worker is charged for inherited pages that it is the first to write to."""
        self._groups: dict[int, ControlGroup | None] = {}
        self._ended: dict[int, int] = {}
        self._next_watch = self._next_scan = 0.0

    def add(self, pid: int, group: ControlGroup | None) -> int:
        if pid > 0:
            self._groups[pid] = group
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        elif group is not None:
            group.remove()
        return pid

    def kill(self, pid: int) -> int:
        """Kills a worker and everything that it started; returns its wait status or a substitute."""
        if pid not in self._ended:
            self._end(pid)
        return self._ended.pop(pid)

    def watch(self) -> float:
        """Ends workers that have died or hold too much memory; returns the seconds until the next check."""
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + WATCH_S
            family = self._family(now) if self._groups else {}
            for pid, group in list(self._groups.items()):
                if processes.has_ended(pid) or (group is not None and group.was_exceeded()):
                    self._end(pid)
                elif shared_memory.exceeds(self._memory, processes.descendants([pid], family), self._inherited):
                    self._end(pid)
                    self._ended[pid] = OUT_OF_SHARED_MEMORY
        return max(self._next_watch - time.monotonic(), 0.001)

    def _family(self, now: float) -> dict[int, list[int]]:
        """All processes, or none if it is too early: listing thousands of them may take at most 2% of a core."""
        if now < self._next_scan:
            return {}
        family = processes.children_by_parent()
        self._next_scan = now + 50 * (time.monotonic() - now)
        return family

    def _end(self, pid: int) -> None:
        status = processes.kill(pid)
        group = self._groups.pop(pid)
        # Orphans of a living worker are still its children.
        processes.kill_children(but=self._groups)
        if group is not None:
            if group.was_exceeded():
                status = OUT_OF_MEMORY
            group.remove()
        self._ended[pid] = status


def _fork(run: Callable[[socket.socket], None], end: int) -> int:
    """Forks a child that runs the function with a socket, which this process closes; returns its id or −errno."""
    try:
        pid = os.fork()
    except OSError as error:
        os.close(end)
        return -(error.errno or errno.EAGAIN)
    if pid == 0:
        with processes.ends_here():
            run(socket.socket(fileno=end))
    os.close(end)
    return pid
