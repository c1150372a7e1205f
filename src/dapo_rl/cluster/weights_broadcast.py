"""Weights that the first rank sends to all engines at once, one bucket at a time: by NCCL from GPU to GPU, or by gloo.

The rank and the engines form a group of torch.distributed of their own, with the rank as number 0. It is formed again
when an engine or the ranks are replaced. Engines stop meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_rl.base.quote import one_line
from dapo_rl.cluster.network import tcp_store, use_interface

LOOK_S = 0.0005
"""Seconds between looks whether a bucket has arrived."""
ALIGNED = 16
"""Bytes. A bucket is sent as one tensor, in which the weights start at multiples of this."""
RAISES = "TORCH_NCCL_BLOCKING_WAIT"
"""The environment variable with which torch reports a lost member as an error."""

Address = tuple[str, int]


class ChannelBrokenError(Exception):
    """The group has lost a member, or a bucket does not arrive."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def sent_as(self, dtype: torch.dtype | None) -> WeightLayout:
        """Numbers that are not floating are not rounded."""
        return WeightLayout(self.name, self.shape, dtype if dtype and self.dtype.is_floating_point else self.dtype)


class WeightChannel:
    def __init__(self, address: Address, index: int, size: int, device: str, timeout_s: float, store: Any = None):
        """Waits so long for the others to join. `store` is the one at the address, in the process that has it."""
        use_interface()
        self.address, self._timeout_s = address, timeout_s
        self._device = torch.device(device)
        patience = timedelta(seconds=timeout_s)
        try:
            self._store = store or tcp_store(*address, timeout=patience)
            if self._device.type == "cuda":
                self._group: Any = _nccl(self._store, index, size)
            else:
                self._group = dist.ProcessGroupGloo(self._store, index, size, timeout=patience)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ChannelBrokenError(one_line(error)) from error

    def send(self, bucket: Sequence[tuple[WeightLayout, Tensor]], alive: Callable[[], None] = lambda: None) -> None:
        """Returns when it is sent; `alive` is called meanwhile."""
        flat, parts = _flat([layout for layout, _ in bucket], self._device)
        for part, (_, tensor) in zip(parts, bucket, strict=True):
            part.copy_(tensor)
        self._broadcast(flat, alive)

    def receive(self, layouts: Sequence[WeightLayout]) -> list[tuple[str, Tensor]]:
        flat, parts = _flat(layouts, self._device)
        self._broadcast(flat)
        return [(layout.name, part) for layout, part in zip(layouts, parts, strict=True)]

    def close(self) -> None:
        """Leaves the group. Others who wait for this member learn of it by gloo at once, by NCCL after their time."""
        self._group.abort()

    def _broadcast(self, flat: Tensor, alive: Callable[[], None] = lambda: None) -> None:
        try:
            work = self._group.broadcast(flat, 0)
            end = time.monotonic() + self._timeout_s
            while not work.is_completed():
                if time.monotonic() > end:
                    raise ChannelBrokenError(f"a bucket did not arrive within {self._timeout_s:g} s")
                alive()
                time.sleep(LOOK_S)
            work.wait()
        except RuntimeError as error:
            raise ChannelBrokenError(one_line(error)) from error


def _nccl(store: Any, index: int, size: int) -> Any:
    """With no time limit of its own. If a member is lost, `wait` raises an error; torch's default is a thread that ends
    the process."""
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(hours=24)
    before = os.environ.get(RAISES)
    os.environ[RAISES] = "1"  # read when the group is formed; the ranks' own group has its own
    try:
        return dist.ProcessGroupNCCL(store, index, size, options)  # type: ignore[attr-defined]
    finally:
        if before is None:
            del os.environ[RAISES]
        else:
            os.environ[RAISES] = before


def _flat(layouts: Sequence[WeightLayout], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    starts, size = [], 0
    for layout in layouts:
        starts.append(size)
        size += -(-layout.nbytes // ALIGNED) * ALIGNED
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    return flat, [
        flat[start : start + layout.nbytes].view(layout.dtype).view(layout.shape)
        for start, layout in zip(starts, layouts, strict=True)
    ]
