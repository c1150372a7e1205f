"""Measures shared memory of processes: RLIMIT_DATA, which limits workers, counts only private memory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple


class _Mapping(NamedTuple):
    file: tuple[str, str]
    """Device and inode. Anonymous shared memory has them too, in an internal file system of the kernel."""
    size: int
    share: int
    """Resident bytes, divided among the processes that map them."""


def mapped_files() -> dict[tuple[str, str], int]:
    """The shared mappings of this process, with their sizes in bytes."""
    sizes: dict[tuple[str, str], int] = {}
    for mapping in _shared_mappings("self"):
        sizes[mapping.file] = sizes.get(mapping.file, 0) + mapping.size
    return sizes


def exceeds(limit: int, pids: Collection[int], but: Collection[tuple[str, str]]) -> bool:
    """Whether processes together hold more than `limit` bytes of shared memory, not counting the given files."""
    # A cheap upper bound, which counts shared pages once per process, usually decides it.
    if sum(_resident(pid) for pid in pids) <= limit:
        return False
    mappings = (mapping for pid in pids for mapping in _shared_mappings(pid))
    return sum(mapping.share for mapping in mappings if mapping.file not in but) > limit


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssShmem:"):
                return int(line.split()[1]) << 10
    return 0


def _shared_mappings(pid: int | str) -> Iterator[_Mapping]:
    """Shared mappings not backed by a block device; the kernel can drop pages of a file on disk."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as smaps:
        file, size = None, 0
        for line in smaps:
            words = line.split()
            if not words[0].endswith(":"):
                _, permissions, _, device, inode = words[:5]
                file = (device, inode) if permissions[3] == "s" and device.startswith("00:") else None
            elif words[0] == "Size:":
                size = int(words[1]) << 10
            elif words[0] == "Pss:" and file is not None:
                yield _Mapping(file, size, int(words[1]) << 10)
