"""GPU memory at a fixed address, whose bytes can be given up and taken again.

torch frees memory together with its address, and a captured CUDA graph replays with the addresses that it was captured
with. Here the CUDA driver's virtual memory functions reserve an address range once, and map physical memory to it in
chunks. Without them the range stays reserved, and any access to it is an error.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30
"""Physical memory is taken in pieces of this size: the driver needs no large contiguous piece."""

_SUCCESS = 0
_OUT_OF_MEMORY = 2
_PINNED = 1
_ON_DEVICE = 1
_READ_AND_WRITE = 3
_MINIMUM_GRANULARITY = 0
_SUPPORTS_VIRTUAL_MEMORY = 102


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuMemGetAllocationGranularity": [ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(_Properties), ctypes.c_int],
    "cuMemAddressReserve": [
        *(ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_size_t, ctypes.c_size_t),
        *(ctypes.c_ulonglong, ctypes.c_ulonglong),
    ],
    "cuMemAddressFree": [ctypes.c_ulonglong, ctypes.c_size_t],
    "cuMemCreate": [
        *(ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_size_t, ctypes.POINTER(_Properties), ctypes.c_ulonglong)
    ],
    "cuMemRelease": [ctypes.c_ulonglong],
    "cuMemMap": [ctypes.c_ulonglong, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_ulonglong],
    "cuMemUnmap": [ctypes.c_ulonglong, ctypes.c_size_t],
    "cuMemSetAccess": [ctypes.c_ulonglong, ctypes.c_size_t, ctypes.POINTER(_Access), ctypes.c_size_t],
}


def can_reserve(device: torch.device) -> bool:
    """Whether the driver has virtual memory functions for this device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    try:
        driver, supported = _driver(), ctypes.c_int()
        driver.cuInit(0)
        error = driver.cuDeviceGetAttribute(ctypes.byref(supported), _SUPPORTS_VIRTUAL_MEMORY, _index(device))
    except (OSError, AttributeError):  # no libcuda.so.1, or one without these functions
        return False
    return error == _SUCCESS and supported.value == 1


class ReservedMemory:
    """A range of GPU memory. Its tensors keep their addresses when it is released and restored.

    It is freed by `close`, or when neither it nor any of its tensors is referenced.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Reserves the addresses and takes the memory; raises a torch.OutOfMemoryError if there is not enough."""
        if nbytes < 1:
            raise ValueError(f"ReservedMemory: {nbytes} bytes")
        torch.cuda.synchronize(device)  # makes the device's context current
        self.device = torch.device("cuda", _index(device))
        self._range = _Range(nbytes, _index(device))
        self._finalizer = weakref.finalize(self, self._range.free)
        self._finalizer.atexit = False  # the driver frees everything when the process ends
        self.restore()

    @property
    def nbytes(self) -> int:
        """The size, rounded up to the driver's granularity."""
        return self._range.nbytes

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def is_mapped(self) -> bool:
        return bool(self._range.handles)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A tensor of the bytes from `offset` on, without a copy; its contents are arbitrary at first."""
        nbytes = prod(shape) * dtype.itemsize
        if offset < 0 or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ValueError(f"ReservedMemory: {nbytes} bytes at {offset} of {self.nbytes}")
        if not self.is_mapped:
            raise RuntimeError("ReservedMemory: a tensor needs memory that is mapped")
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        # The interface has no name for bfloat16. The tensor refers to the view, and thus to this object.
        view = _View(self, self.address + offset, nbytes)
        return torch.as_tensor(view, device=self.device).view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Gives the memory up, with its contents, once the work that is queued on the device is done."""
        if self.is_mapped:
            torch.cuda.synchronize(self.device)
            self._range.unmap()

    def restore(self) -> None:
        """Takes memory again at the same addresses; its contents are arbitrary. If there is not enough, raises a
        torch.OutOfMemoryError and stays released."""
        if self.is_mapped:
            return
        if self._range.address == 0:
            raise RuntimeError("ReservedMemory: it is closed")
        torch.cuda.synchronize(self.device)
        try:
            self._range.map()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what torch keeps for later is not free for the driver
            self._range.map()

    def close(self) -> None:
        """Frees memory and addresses; its tensors must not be used any more."""
        self._finalizer()


class _View:
    """Bytes of a memory, as torch reads them."""

    def __init__(self, memory: ReservedMemory, address: int, nbytes: int) -> None:
        self._memory, self._address, self._nbytes = memory, address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._address, False)
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 2}


class _Range:
    """The reserved addresses, and the handles of the physical memory that is mapped to them."""

    def __init__(self, nbytes: int, device: int) -> None:
        self._device = device
        location = _Location(_ON_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_AND_WRITE)
        granularity = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            _MINIMUM_GRANULARITY,
        )
        self.nbytes = -(-nbytes // granularity.value) * granularity.value
        address = ctypes.c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        self.address = address.value
        """0 when the range is freed."""
        self.handles: list[tuple[int, int, int]] = []
        """Address, size and handle of each chunk; empty if nothing is mapped."""

    def map(self) -> None:
        """Maps all of the range, or nothing if there is not enough memory."""
        try:
            for start in range(0, self.nbytes, CHUNK_BYTES):
                self._map_chunk(self.address + start, min(CHUNK_BYTES, self.nbytes - start))
            _call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(self._access), 1)
        except BaseException:
            self._unmap()
            raise
        _count(self._device, self.nbytes)

    def unmap(self) -> None:
        self._unmap()
        _count(self._device, -self.nbytes)

    def free(self) -> None:
        if self.handles:
            torch.cuda.synchronize(self._device)  # queued work may still use the memory
            self.unmap()
        if self.address:
            _call("cuMemAddressFree", self.address, self.nbytes)
            self.address = 0

    def _map_chunk(self, address: int, nbytes: int) -> None:
        handle = ctypes.c_ulonglong()
        error = _driver().cuMemCreate(ctypes.byref(handle), nbytes, ctypes.byref(self._properties), 0)
        if error == _OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._device)
            raise torch.OutOfMemoryError(
                f"out of GPU memory: {self.nbytes / 2**30:.2f} GiB are needed, and "
                f"{(free + sum(size for _, size, _ in self.handles)) / 2**30:.2f} of {total / 2**30:.2f} are free"
            )
        _check("cuMemCreate", error)
        try:
            _call("cuMemMap", address, nbytes, 0, handle.value, 0)
        except BaseException:
            _call("cuMemRelease", handle.value)
            raise
        self.handles.append((address, nbytes, handle.value))

    def _unmap(self) -> None:
        while self.handles:
            address, nbytes, handle = self.handles.pop()
            _call("cuMemUnmap", address, nbytes)
            _call("cuMemRelease", handle)


_mapped: Counter[int] = Counter()
"""Bytes that are mapped on each device."""
_peak: dict[int, int] = {}


def peak_bytes(device: torch.device) -> int:
    """The most memory that torch's tensors and reserved memory took together since `reset_peak`."""
    index = _index(device)
    return max(_peak.get(index, 0), torch.cuda.max_memory_allocated(index) + _mapped[index])


def reset_peak(device: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats(device)
    _peak.pop(_index(device), None)


def _count(index: int, nbytes: int) -> None:
    """Counts memory that is mapped from now on. torch's own peak must not be added to memory that was mapped at
    another time, so it starts again."""
    _peak[index] = peak_bytes(torch.device("cuda", index))
    torch.cuda.reset_peak_memory_stats(index)
    _mapped[index] += nbytes


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, error: int) -> None:
    if error != _SUCCESS:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{name}: CUDA error {error}: {(text.value or b'unknown').decode(errors='replace')}")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
