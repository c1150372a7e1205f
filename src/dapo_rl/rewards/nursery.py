"""Processes for a verifier: a nursery that forks workers, and what a worker does.

The nursery is forked from the run once, early, and has a single thread, so that workers can be forked from it at any
time: from the run itself, with its many threads, they could not. Forking hands the verifier over as it is, closures and
open files included; only prompts, samples and verdicts are pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from dapo_rl.errors import UserError
from dapo_rl.types import Prompt, Sample, Verifier

_REQUEST = struct.Struct("<cq")  # b"+" and 0: fork a worker; b"-" and its id: kill and bury it
_REPLY = struct.Struct("<q")
_LENGTH = struct.Struct("<Q")
_READY = b"!"
_PR_SET_PDEATHSIG = 1

START_S = 60.0
"""For a worker to start, on a machine that is busy."""


class Reply(NamedTuple):
    """What a worker says of one call."""

    kind: Literal["verdicts", "raised", "failed"]
    payload: Any
    """The verdicts; the exception, for the caller to raise; what went wrong, where the verifier broke down."""
    worn: bool = False
    """The worker ran out of memory and still holds much of it: take another one."""


class NurseryGoneError(UserError):
    """The nursery has ended, so there are no new workers."""


class Worker:
    """The run's end of a worker."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel

    def call(self, prompt: Prompt, samples: Sequence[Sample], limit_s: float) -> Reply:
        """TimeoutError where no whole reply came in time, EOFError where the worker died."""
        deadline = time.monotonic() + limit_s
        try:
            self._channel.settimeout(limit_s)
            _send(self._channel, (prompt, samples))
            return _receive(self._channel, deadline)  # type: ignore[no-any-return]
        except ConnectionError as error:
            raise EOFError(str(error)) from None

    def hang_up(self) -> None:
        # Another process forked from the run may hold a copy of the socket; this ends it for all of them.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


class Nursery:
    """The run's end of the nursery. Its methods may be called from any thread."""

    def __init__(self, verifier: Verifier, memory_mb: int) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        run, by_main_thread = os.getpid(), threading.current_thread() is threading.main_thread()
        _flush()  # else what is buffered is written twice
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, where the run has threads already
            self.pid = os.fork()
        if self.pid == 0:
            with _last_words():
                self._control.close()
                _raise_workers(theirs, verifier, memory_mb << 20, run, by_main_thread)
        theirs.close()

    def spawn(self) -> Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask(b"+", 0, theirs)
            if pid < 0:
                raise OSError(-pid, f"a worker for the verifier cannot be forked: {os.strerror(-pid)}")
            ours.settimeout(START_S)
            if ours.recv(1) != _READY:  # its start is not part of the first call's time
                raise OSError(errno.ECHILD, "a worker for the verifier died at its start")
        except BaseException:
            ours.close()
            raise
        return Worker(pid, ours)

    def bury(self, worker: Worker) -> int:
        """Kills the worker, and all that it started in its process group; its wait status."""
        worker.hang_up()
        return self._ask(b"-", worker.pid)

    def close(self, patience_s: float = 2.0) -> None:
        """Ends the nursery, which kills its workers."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:  # it is still warming up
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        self._control.close()

    def _ask(self, request: bytes, pid: int, end: socket.socket | None = None) -> int:
        try:
            with self._lock:
                message = _REQUEST.pack(request, pid)
                if end is None:
                    self._control.sendall(message)
                else:
                    socket.send_fds(self._control, [message], [end.fileno()])
                return _REPLY.unpack(_read(self._control, _REPLY.size))[0]  # type: ignore[no-any-return]
        except (OSError, EOFError):
            raise NurseryGoneError(
                f"reward.verifier: the process that forks its workers (pid {self.pid}) has ended; "
                "if the system killed it for want of memory, lower reward.workers or reward.memory_mb"
            ) from None


def _raise_workers(control: socket.socket, verifier: Verifier, memory: int, run: int, by_main_thread: bool) -> None:
    """The nursery's life: fork workers and bury them, until the run closes the socket or is gone."""
    _settle()
    if by_main_thread:  # the signal comes at the end of the *thread* that forked
        _die_with(run)
    with contextlib.suppress(Exception):  # what cannot be loaded is reported by the call that needs it
        warm_up = getattr(verifier, "warm_up", None)
        if warm_up is not None:
            warm_up()
    gc.freeze()  # a collection in a worker then writes to no page that it shares
    control.settimeout(1.0)
    workers: set[int] = set()
    try:
        while os.getppid() == run:
            try:
                message, ends, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            except TimeoutError:
                continue
            if len(message) < _REQUEST.size:
                break
            request, pid = _REQUEST.unpack(message)
            if request == b"+":
                reply = _fork_worker(control, ends[0], verifier, memory)
                os.close(ends[0])
                if reply > 0:
                    workers.add(reply)
            else:
                reply = _kill(pid)
                workers.discard(pid)
            control.sendall(_REPLY.pack(reply))
    except ConnectionError:
        pass
    finally:
        for pid in workers:
            _kill(pid)


def _fork_worker(control: socket.socket, end: int, verifier: Verifier, memory: int) -> int:
    nursery = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    if pid == 0:
        with _last_words():
            _die_with(nursery)
            control.close()
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            _work(socket.socket(fileno=end), verifier, memory)
    # Its own group: what it starts is killed with it. Set by both, since either may come first.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _kill(pid: int) -> int:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _work(channel: socket.socket, verifier: Verifier, memory: int) -> None:
    """A worker's life: a reply for each call, until the run closes the socket."""
    before = _limit_memory(memory)
    channel.sendall(_READY)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            prompt, samples = _receive(channel)
            _seed(prompt, samples)
            reply = _reply(verifier, prompt, samples)
            if _data_bytes() - before > memory // 8 and _ran_out(reply):
                reply = reply._replace(worn=True)
            _flush()
            _send(channel, reply)


def _reply(verifier: Verifier, prompt: Prompt, samples: Sequence[Sample]) -> Reply:
    try:
        return Reply("verdicts", verifier(prompt, samples))
    except MemoryError:
        return Reply("failed", "ran out of memory (reward.memory_mb)")
    except Exception as error:
        if not isinstance(error, UserError):
            error.add_note("".join(["In a worker of the verifier:\n", *traceback.format_exception(error)]))
        return Reply("raised", _portable(error))
    except BaseException as error:  # sys.exit() in a verifier ends neither the worker nor the run
        return Reply("failed", f"raised {type(error).__name__}: {error}")


def _ran_out(reply: Reply) -> bool:
    return reply.kind != "verdicts" or any(verdict.failed for verdict in reply.payload)


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _settle() -> None:
    """Takes off what the run had for itself: signal handlers, the terminal's input, threads."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # The run decides when to stop: Ctrl-C, a closed terminal, a scheduler's warning go to every process. A handler,
        # unlike SIG_IGN, is not passed on to programs that a verifier starts.
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _limit_memory(memory: int) -> int:
    """Limits what is allocated from here on; what was there at the fork does not count."""
    import resource

    before = _data_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if before:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = before + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return before


def _data_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _seed(prompt: Prompt, samples: Sequence[Sample]) -> None:
    """A verifier that draws random numbers draws the same ones in any worker."""
    seed = zlib.crc32(prompt.id.encode("utf-8", "surrogatepass"))
    for sample in samples:
        seed = zlib.crc32(sample.text.encode("utf-8", "surrogatepass"), seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def _send(channel: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket, deadline: float | None = None) -> Any:
    length = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))[0]
    return pickle.loads(_read(channel, length, deadline))


def _read(channel: socket.socket, count: int, deadline: float | None = None) -> bytearray:
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """Ends a forked process where its work ends: what the run does at exit is not done here."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        _flush()
        os._exit(1)
    finally:
        os._exit(0)
