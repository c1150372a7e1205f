"""Limits on the memory of workers.

- RLIMIT_DATA limits the private memory of each process. Exceeding it is a MemoryError in the worker's own code.
- A control group per worker limits the memory of all its processes together. The groups are children of the run's own
  group, so its limits apply to them too. Both versions of control groups are supported. If none can be created (no
  permission, no mount, no Linux), the workers have none.
- Shared memory, which RLIMIT_DATA does not count, is measured from outside: `shared_memory_exceeds`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dapo_rl.base.host_memory import PROC, own_group, read_text

MAX_REPLY = 64 << 20
"""Size limit of a reply in bytes; sixteen verdicts usually take a few kilobytes."""
PATIENCE_S = 1.0
"""Time for killed processes to leave a group. A process that cannot be killed is left, with its group."""
_NEAR = 4 << 20
"""A group that was denied memory is within a huge page of its limit."""
_NAME = re.compile(r"dapo-[a-z]+-(\d{1,9})-\d+")
"""Contains the supervisor's process id and a number."""


class PrivateMemory:
    """Limits further private allocations of this process; memory from before the fork does not count."""

    def __init__(self, size: int) -> None:
        import resource

        self._size, self._before = size, _data_bytes()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._before:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            limit = self._before + size if hard == resource.RLIM_INFINITY else min(self._before + size, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def is_short(self) -> bool:
        """Whether an eighth of the memory is in use. After a failure, this means that it was not released."""
        return _data_bytes() - self._before > self._size // 8


def _data_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class ControlGroup:
    """The group of a worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events = (f"{path}/memory.events", f"{path}/memory.oom_control")  # built once: they are read at each call

    def limit(self, size: int) -> None:
        """Raises OSError if there is no such limit."""
        is_v1 = os.path.exists(self.path / "memory.limit_in_bytes")
        _write(self.path / ("memory.limit_in_bytes" if is_v1 else "memory.max"), str(size))
        # No swap, and kill rather than pause. Not every kernel has these.
        first = {"memory.memsw.limit_in_bytes": str(size), "memory.oom_control": "0"}
        second = {"memory.swap.max": "0", "memory.oom.group": "1"}
        for name, value in (first if is_v1 else second).items():
            with contextlib.suppress(OSError):
                _write(self.path / name, value)

    def enter(self) -> None:
        """Moves this process and its future children into the group."""
        with contextlib.suppress(OSError):
            _write(self.path / "cgroup.procs", "0")

    def was_exceeded(self) -> bool:
        """Whether the kernel has killed a process because of the group's limit rather than the machine's."""
        events = read_text(self._events[0]) or read_text(self._events[1])
        counts = dict(line.split() for line in events.splitlines())
        if not int(counts.get("oom_kill", 0)):
            return False
        if "oom" in counts:
            return int(counts["oom"]) > 0
        # Version 1 has no such counter, and not every kernel has `memory.failcnt`.
        most = (read_text(self.path / f"memory.{name}max_usage_in_bytes") for name in ("", "memsw."))
        return max(int(size or 0) for size in most) > int(read_text(self.path / "memory.limit_in_bytes") or 0) - _NEAR

    def pids(self) -> list[int]:
        """Processes in the group; 0 is a process in another namespace."""
        return list(map(int, read_text(self.path / "cgroup.procs").split()))

    def remove(self) -> None:
        """Kills everything in the group and removes it."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_removed() and time.monotonic() < deadline:
            try:
                _write(self.path / "cgroup.kill", "1")
            except OSError:
                for pid in filter(None, self.pids()):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            for child in _directories(self.path):  # created by the verifier
                ControlGroup(child).remove()
            time.sleep(0.001)

    def _is_removed(self) -> bool:
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        return not os.path.exists(self.path)


class ControlGroups:
    """The groups below a directory (None: no groups). Their names contain the process id of their supervisor."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def new(self, supervisor: int, size: int, name: str = "verifier") -> ControlGroup | None:
        """A group with a limit in bytes, or None if it cannot be created."""
        if self.directory is None:
            return None
        for number in itertools.count():
            group = ControlGroup(self.directory / f"dapo-{name}-{supervisor}-{number}")
            try:
                os.mkdir(group.path)
                group.limit(size)
            except FileExistsError:
                continue
            except OSError:
                group.remove()
                return None
            return group
        raise AssertionError

    def remove(self, supervisor: int) -> None:
        """Removes the supervisor's groups and kills their processes."""
        for owner, group in self._all():
            if owner == supervisor:
                group.remove()

    def remove_abandoned(self) -> None:
        """Removes the groups of supervisors that were killed."""
        for owner, group in self._all():
            # If a group has processes in another namespace, its supervisor may be alive there.
            if (owner == os.getpid() or not os.path.exists(f"/proc/{owner}")) and 0 not in group.pids():
                group.remove()

    def _all(self) -> Iterator[tuple[int, ControlGroup]]:
        for path in _directories(self.directory) if self.directory is not None else ():
            if name := _NAME.fullmatch(path.name):
                yield int(name[1]), ControlGroup(path)


def find_groups(proc: Path = PROC) -> ControlGroups:
    """The groups below that of this process."""
    own = own_group(proc)
    if own is None or (own.version == 2 and not _enable(own.path)):
        return ControlGroups(None)
    return ControlGroups(own.path)


def _enable(directory: Path) -> bool:
    """Whether version 2 accounts memory below this group. Only the root may have both processes and such children."""
    if "memory" in read_text(directory / "cgroup.subtree_control").split():
        return True
    with contextlib.suppress(OSError):
        _write(directory / "cgroup.subtree_control", "+memory")
        return True
    return False


def _directories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _write(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY)  # does not create the file
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


File = tuple[str, str]
"""Device and inode. Anonymous shared memory has them too, in an internal file system of the kernel."""


def shared_files() -> dict[File, int]:
    """The shared mappings of this process, with their sizes in bytes."""
    sizes: dict[File, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for words in map(str.split, maps):
            if file := _shared_file(words):
                start, _, end = words[0].partition("-")
                sizes[file] = sizes.get(file, 0) + int(end, 16) - int(start, 16)
    return sizes


def shared_memory_exceeds(limit: int, pids: Collection[int], but: Collection[File]) -> bool:
    """Whether processes together hold more than `limit` bytes of shared memory, not counting the given files."""
    # A cheap upper bound, which counts shared pages once per process, usually decides it.
    if sum(_resident(pid) for pid in pids) <= limit:
        return False
    shares = (share for pid in pids for file, share in _shares(pid) if file not in but)
    return sum(shares) > limit


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssShmem:"):
                return int(line.split()[1]) << 10
    return 0


def _shares(pid: int) -> Iterator[tuple[File, int]]:
    """Shared mappings of a process with their resident bytes, divided among the processes that map them. The kernel
    looks at every page for this, which takes a few hundredths of a second."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as smaps:
        file = None
        for line in smaps:
            words = line.split()
            if not words[0].endswith(":"):
                file = _shared_file(words)
            elif words[0] == "Pss:" and file is not None:
                yield file, int(words[1]) << 10


def _shared_file(words: Sequence[str]) -> File | None:
    """The file of a line of `maps`, if it is shared and not on a block device, whose pages the kernel can drop."""
    _, permissions, _, device, inode = words[:5]
    return (device, inode) if permissions[3] == "s" and device.startswith("00:") else None
