"""Copies tensors to host memory, so that they can be written to disk while the originals change."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dapo_rl.base.format import gib
from dapo_rl.base.host_memory import host_memory

COPY_SHARE = 0.75
"""The share of the host's memory that a run and its copies may take."""


def why_no_copy(nbytes: int, taken: int = 0) -> str | None:
    """Why there is no copy of so many bytes in host memory, of which the run itself takes `taken`; None if it fits."""
    has = host_memory()
    if nbytes + taken <= COPY_SHARE * has:
        return None
    return f"a copy in host memory would take {gib(nbytes)} of {gib(has)}"


class HostCopy:
    """Copies nested tensors. The next copy reuses the memory, so that it is allocated once in a run.

    Tensors that share memory, such as tied weights, share it in the copy too.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, values: Any) -> Any:
        """Copies `values`; the result is valid until the next `take`."""
        self._shared.clear()
        copied = self._copy(values, "")
        self._synchronize()
        return copied

    def take_more(self, items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies tensors that are computed one at a time, each freed before the next. Those that are part of the last
        `take` are not copied again."""
        copied: dict[str, Tensor] = {}
        for name, tensor in items:
            known = self._shared.get(_identity(tensor))
            copied[name] = self._copy_tensor(tensor, f"more.{name}") if known is None else known
            del tensor
        self._synchronize()
        return copied

    def _copy(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._copy_shared(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._copy(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._copy(inner, f"{name}.{key}") for key, inner in enumerate(value)])
        return value

    def _copy_shared(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "__tensor_flatten__"):  # a moment of an 8-bit optimizer consists of several tensors
            names, context = tensor.__tensor_flatten__()
            parts = {part: self._copy_shared(getattr(tensor, part), f"{name}.{part}") for part in names}
            whole: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
            return whole
        key = _identity(tensor)
        if key not in self._shared:
            self._shared[key] = self._copy_tensor(tensor, name)
        return self._shared[key]

    def _copy_tensor(self, tensor: Tensor, name: str) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = torch.empty_like(tensor, device="cpu")
            if tensor.is_cuda:
                self._pin(buffer)
        # On the stream of the computation: memory that `take_more` frees is not reused before it is copied.
        buffer.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def _pin(self, buffer: Tensor) -> None:
        """Page-locks the buffer. `pin_memory=True` would round its size up to a power of two."""
        runtime = torch.cuda.cudart()
        if buffer.nbytes and int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
            # The callback refers to the buffer, which is therefore freed after it is unlocked.
            weakref.finalize(self, lambda: runtime.cudaHostUnregister(buffer.data_ptr()))

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
