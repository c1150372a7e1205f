"""Measures shared memory of processes: RLIMIT_DATA, which limits workers, counts only private memory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

File = tuple[str, str]
"""Device and inode. Anonymous shared memory has them too, in an internal file system of the kernel."""


def mapped_files() -> dict[File, int]:
    """The shared mappings of this process, with their sizes in bytes."""
    sizes: dict[File, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for words in map(str.split, maps):
            if file := _shared_file(words):
                start, _, end = words[0].partition("-")
                sizes[file] = sizes.get(file, 0) + int(end, 16) - int(start, 16)
    return sizes


def exceeds(limit: int, pids: Collection[int], but: Collection[File]) -> bool:
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
