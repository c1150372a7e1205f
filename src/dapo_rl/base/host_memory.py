"""The memory that this process may use, and the control group (version 1 or 2) that limits it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

PROC = Path("/proc/self")


def host_memory(proc: Path = PROC, physical: int | None = None) -> int:
    """Bytes of RAM: the machine's, or the limit of this process's control group if that is lower."""
    if physical is None:
        physical = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = own_group(proc)
    return min([physical, *group.limits()]) if group is not None else physical


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    version: Literal[1, 2]
    mount: Path
    path: Path

    def limits(self) -> Iterator[int]:
        """The limits of the group and its parents in bytes. In version 1 a huge number means no limit."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        for group in (self.path, *self.path.parents):
            limit = 0
            with contextlib.suppress(ValueError):  # no such file, or the word "max"
                limit = int(read_text(group / name))
            if limit > 0:
                yield limit
            if group == self.mount:
                return


def own_group(proc: Path = PROC) -> MemoryGroup | None:
    """The group of this process; None if memory is not accounted, or if the system is not Linux."""
    try:
        return _own_group(read_text(proc / "cgroup"), read_text(proc / "mountinfo"))
    except ValueError:  # a system that only resembles Linux
        return None


def _own_group(groups: str, mounts: str) -> MemoryGroup | None:
    own: dict[Literal[1, 2], str] = {}
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own[1] = path
        elif number == "0":
            own[2] = path
    if not own:
        return None
    version = min(own)  # if version 1 accounts for memory, version 2 does not
    return _mounted(mounts, version, PurePosixPath(own[version]))


def _mounted(mounts: str, version: Literal[1, 2], own: PurePosixPath) -> MemoryGroup | None:
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, point = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), word) for word in left.split()[3:5])
        file_system, _, options = right.split(" ", 2)
        is_it = file_system == "cgroup2" if version == 2 else file_system == "cgroup" and "memory" in options.split(",")
        if is_it and own.is_relative_to(root) and ".." not in own.parts:
            return MemoryGroup(version, Path(point), Path(point) / own.relative_to(root))
    return None


def read_text(path: Path | str) -> str:
    """The contents of a kernel file; empty if it is missing or unreadable."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b"")).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(file)
