"""Functions of supervisors, fork servers and workers: setup, termination, and their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLEAN_UP_S, _PATIENCE_S = 0.75, 1.0
"""Time for a process to clean up, and for killed processes to end. Processes that cannot be killed are left."""


def settle() -> None:
    """Drops what a forked process inherits from the run: signal handlers, the terminal's input, threads."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # The run decides when to stop, but Ctrl-C, a closed terminal and a scheduler's warning reach every process.
        # Unlike SIG_IGN, a handler is not inherited by programs that user code starts.
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


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Makes descendants whose parent has ended children of this process, so that daemons can be killed."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_ended(child: int) -> bool:
    """Whether a child is dead, without reaping it; False if the platform cannot tell."""
    if not hasattr(os, "waitid"):
        return False
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(pid: int) -> int:
    """Kills a child; returns its wait status."""
    if not os.path.isdir("/proc/self"):  # `kill_children` needs /proc; otherwise kill the process group
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def kill_children(but: Collection[int] = ()) -> None:
    """Kills all children of this process, except the given ones, and their descendants, until none is left."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _PATIENCE_S:
        tree = children_by_parent()
        others = set(tree.get(os.getpid(), ())) - set(but)
        if not others:
            return
        for pid in descendants(others, tree):
            if passed > _CLEAN_UP_S or not _cleans_up(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for pid in others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _cleans_up(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes shared memory once its creators have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"multiprocessing.resource_tracker" in command.read()
    except OSError:
        return False


def reap(unclaimed: Collection[int]) -> set[int]:
    """Reaps dead children that the last call already returned, for which nobody waits; returns those there are now."""
    dead = {pid for pid, state, parent in _all_processes() if state == b"Z" and parent == os.getpid()}
    for pid in dead & set(unclaimed):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return dead - set(unclaimed)


def children_by_parent() -> dict[int, list[int]]:
    """All processes, by their parent; empty without /proc."""
    tree: dict[int, list[int]] = {}
    for pid, _, parent in _all_processes():
        tree.setdefault(parent, []).append(pid)
    return tree


def _all_processes() -> Iterator[tuple[int, bytes, int]]:
    """Each process with its state and its parent."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # A program's name may contain blanks and parentheses; state and parent come after it.
                state, parent, *_ = stat.read().rpartition(b")")[2].split()
                yield int(name), state, int(parent)


def descendants(roots: Iterable[int], tree: dict[int, list[int]]) -> list[int]:
    """The given processes and all of their descendants."""
    found = list(roots)
    for pid in found:
        found += tree.get(pid, ())
    return found


def private_bytes() -> int:
    """The private memory of this process: the most that a forked process can copy."""
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith((b"RssAnon:", b"VmSwap:")))
    return 0


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


@contextlib.contextmanager
def ends_here() -> Iterator[None]:
    """Exits a forked process at the end of the block, without the exit handlers of the run."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        flush()
        os._exit(1)
    finally:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
