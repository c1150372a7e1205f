"""The processes that fork workers, and the run's handle on them: see the package's documentation."""

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
import weakref
from collections.abc import Callable

from dapo_rl.errors import UserError
from dapo_rl.workers import limits, processes
from dapo_rl.workers.limits import ControlGroup, ControlGroups
from dapo_rl.workers.worker import READY, Service, Worker, read_exactly, work

_REQUEST = struct.Struct("<cq")
_NEW, _KILL = b"+", b"-"
"""Requests. To the supervisor: fork a fork server for the attached socket. To a fork server: fork a worker for the
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


_run_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The run's ends of all sockets to supervisors, fork servers and workers, which the workers of another service must not
inherit: user code could write to them."""


class ForkServerGoneError(Exception):
    """The fork server has ended, with its workers; `spawn` starts another one."""


class WorkerDiedError(Exception):
    """A new worker died before it was ready."""


class Supervisor:
    """The run's handle on the supervisor process and the current fork server. Its methods are thread-safe."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._server: socket.socket | None = None
        self._generation = 0
        self._deaths = 0
        self.server_pid = 0
        run = os.getpid()
        self._groups = limits.find_groups()
        processes.flush()  # otherwise buffered output is written twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns if the run already has threads
            self.pid = os.fork()
        if self.pid == 0:
            with processes.ends_here():
                for end in [self._channel, *_run_ends]:
                    end.close()
                _supervise(theirs, service, run, self._groups)
        theirs.close()
        _run_ends.add(self._channel)
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
                raise OSError(-pid, f"a worker for the {self.service.name} cannot be forked: {os.strerror(-pid)}")
            worker = Worker(pid, generation, ours)
            _run_ends.add(ours)
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
        """Ends the supervisor process, which kills all of its descendants."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        self._groups.remove(self.pid)  # in case the supervisor process itself was killed
        self._channel.close()

    def _start(self) -> None:
        self.check()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = _request(self._channel, _NEW, 0, theirs)
        except (OSError, EOFError):
            ours.close()
            raise self._error() from None
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"the {self.service.name}'s processes cannot be forked: {os.strerror(-pid)}")
        self._server, self.server_pid = ours, pid
        _run_ends.add(ours)

    def _ask(self, request: bytes, pid: int, end: socket.socket | None = None) -> int:
        if self._server is None:
            raise ForkServerGoneError
        try:
            return _request(self._server, request, pid, end)
        except (OSError, EOFError):
            self._server.close()
            self._server = None
            self._generation += 1
            self._deaths += 1
            raise ForkServerGoneError from None

    def _error(self) -> UserError:
        section, name = self.service.section, self.service.name
        return UserError(
            f"{section}.{name}: the process that forks its workers (pid {self.server_pid}) has ended; "
            f"if the system ran out of memory, lower {section}.workers or {section}.memory_mb"
        )


def _request(channel: socket.socket, request: bytes, pid: int, end: socket.socket | None) -> int:
    message = _REQUEST.pack(request, pid)
    if end is None:
        channel.sendall(message)
    else:
        socket.send_fds(channel, [message], [end.fileno()])
    return _REPLY.unpack(read_exactly(channel, _REPLY.size))[0]  # type: ignore[no-any-return]


def _answer_requests(
    control: socket.socket, parent: int, wait_s: Callable[[], float], handle: Callable[[bytes, int, list[int]], int]
) -> None:
    """Replies to requests until the run closes the socket or the parent ends; `wait_s` is called before each wait."""
    with contextlib.suppress(ConnectionError):
        while os.getppid() == parent:
            control.settimeout(wait_s())
            try:
                message, ends, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            except TimeoutError:
                continue
            if len(message) < _REQUEST.size:
                break
            request, pid = _REQUEST.unpack(message)
            control.sendall(_REPLY.pack(handle(request, pid, ends)))


def _supervise(control: socket.socket, service: Service, run: int, groups: ControlGroups) -> None:
    """The main program of the supervisor: forks fork servers on request."""
    processes.settle()
    processes.adopt_orphans()
    gc.freeze()
    own, server = os.getpid(), 0
    groups.remove_abandoned()

    def clean_up() -> None:
        nonlocal server
        processes.kill_children()
        groups.remove(own)
        server = 0

    def watch() -> float:
        if server > 0 and processes.has_ended(server):
            clean_up()  # leftover children of its workers may hold copies of sockets on whose end the run waits
        return WATCH_S

    def serve(end: socket.socket) -> None:
        processes.die_with(own)
        control.close()
        _serve(end, service, own, groups)

    def new(_request: bytes, _pid: int, ends: list[int]) -> int:
        nonlocal server
        clean_up()
        server = _fork(serve, ends[0])
        return server

    try:
        _answer_requests(control, run, watch, new)
    finally:
        clean_up()


def _serve(control: socket.socket, service: Service, supervisor: int, groups: ControlGroups) -> None:
    """The main program of a fork server: forks and kills workers on request."""
    processes.adopt_orphans()
    server = os.getpid()
    with contextlib.suppress(BaseException):
        service.warm_up()
    if os.getpid() != server:  # a copy that user code forked and let return
        return
    gc.freeze()  # so that garbage collection in a worker does not copy shared pages
    workers = _Workers(service.memory_mb << 20)

    def start(group: ControlGroup | None, end: socket.socket) -> None:
        processes.die_with(server)
        if group is not None:
            group.enter()
        control.close()
        # A process group of its own, set by both sides, since either may run first.
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        work(end, service, group)

    def handle(request: bytes, pid: int, ends: list[int]) -> int:
        if request == _KILL:
            return workers.kill(pid)
        group = groups.new(supervisor, workers.group_limit, service.name)
        return workers.add(_fork(functools.partial(start, group), ends[0]), group)

    _answer_requests(control, supervisor, workers.watch, handle)


class _Workers:
    """The workers of this fork server."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._inherited = limits.shared_files()
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
            tree = self._process_tree(now) if self._groups else {}
            for pid, group in list(self._groups.items()):
                if processes.has_ended(pid) or (group is not None and group.was_exceeded()):
                    self._end(pid)
                elif limits.shared_memory_exceeds(self._memory, processes.descendants([pid], tree), self._inherited):
                    self._end(pid)
                    self._ended[pid] = OUT_OF_SHARED_MEMORY
        return max(self._next_watch - time.monotonic(), 0.001)

    def _process_tree(self, now: float) -> dict[int, list[int]]:
        """All processes, or none if it is too early: listing thousands of them may take at most 2% of a core."""
        if now < self._next_scan:
            return {}
        tree = processes.children_by_parent()
        self._next_scan = now + 50 * (time.monotonic() - now)
        return tree

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
