"""Weights that a rank lends to the engines on its GPU, one bucket at a time: by CUDA IPC, or on a CPU in shared memory.

They pass through no other memory, and no more than a bucket of them is there twice. The engine stops meanwhile.
torch.multiprocessing makes the handles; each is for one engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from dapo_rl.cluster.ray_session import import_ray

LENT_BYTES = 256 << 20
"""Size of a bucket."""
LOOK_S = 0.1
"""Seconds between looks whether an engine has stopped reading."""
END, BROKEN_OFF = b"end", b"broken off"
"""In place of a handle: all buckets were lent, or no more will come although some are missing."""

Bucket = Sequence[tuple[str, Tensor]]
Borrowers = Callable[[], Sequence[int]]
"""The rank from which each borrower takes the next bucket."""


def memory_of(device: str) -> str:
    """Names the memory of a process: its GPU, or its host. Two processes of the same can lend to each other."""
    if device == "cuda":
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return str(import_ray().get_runtime_context().get_node_id())


def lend(bucket: Bucket, borrowers: int) -> list[bytes]:
    """A handle for each borrower. The tensors must not change, and must outlive what the borrowers do with them."""
    if not borrowers:
        return []
    torch.multiprocessing.set_sharing_strategy("file_system")  # borrowers are no children of this process
    if any(tensor.is_cuda for _, tensor in bucket):
        torch.cuda.synchronize()
    return [bytes(ForkingPickler.dumps(list(bucket))) for _ in range(borrowers)]


def borrow(handle: bytes) -> list[tuple[str, Tensor]]:
    bucket: list[tuple[str, Tensor]] = pickle.loads(handle)
    return bucket


class BrokenOffError(Exception):
    """Some of the weights are missing, and will not come."""


class BorrowedWeights:
    """A WeightSource in an engine's process, which gets its buckets while it is read."""

    def __init__(self, read: Callable[[Any], list[tuple[str, Tensor]]] = borrow) -> None:
        """`read` makes a bucket of its handle."""
        self._read = read
        self._handles: SimpleQueue[tuple[Any, Event]] = SimpleQueue()
        self._closed = Event()

    def feed(self, handle: Any) -> bool:
        """Hands over a bucket, END or BROKEN_OFF, and waits until it has been read; whether more can follow. Called by
        another thread than the one that reads."""
        read = Event()
        self._handles.put((handle, read))
        while not read.wait(LOOK_S) and not self._closed.is_set():
            pass
        return handle != END and not self._closed.is_set()

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        while True:
            handle, read = self._handles.get()
            if handle == END:
                read.set()
                return
            if handle == BROKEN_OFF:
                raise BrokenOffError
            yield self._read(handle)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            read.set()

    def close(self) -> None:
        """Nothing is read any more, so that `feed` returns."""
        self._closed.set()
