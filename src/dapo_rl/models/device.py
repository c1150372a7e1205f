"""Computing on a device: copies to it that do not wait for it, and the matrix products of a CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device.

    A copy from pageable memory waits until the GPU has finished everything queued before it, which then has nothing to
    do until more is queued; a copy from pinned memory is queued with the rest.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fill_rows(tensor: Tensor, rows: Sequence[int], value: float) -> None:
    """`tensor[rows] = value`, which on a GPU would copy the value to the device and wait for that."""
    tensor.index_fill_(0, to_device(np.array(rows), tensor.device), value)


@contextmanager
def quick_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Uses the faster library for a model's matrix products.

    On 64-bit Arm, torch uses oneDNN for float32 products. For small matrices it is up to 17 times slower than BLAS
    (64 × 128 × 128 on two cores: 0.74 ms against 0.04 ms), and for large ones no faster.
    """
    on_arm = device.type == "cpu" and platform.machine() in ("aarch64", "arm64")
    if not (on_arm and dtype == torch.float32):
        yield
        return
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


ALONE = 2**23
"""Up to this many multiplications run on one thread: a quarter of a millisecond."""


@contextmanager
def enough_threads(multiplications: int) -> Iterator[None]:
    """Uses one thread for small products, and all threads for large ones.

    Threads synchronize after every product. If another program occupies a core, each synchronization waits for the
    scheduler: a decoding step of 176 rows of the embedded model then takes 88–125 ms on two threads and 26 ms on one;
    on an idle machine, 19 ms and 26 ms.
    """
    threads = torch.get_num_threads()
    if multiplications > ALONE or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def largest_product(model: Any) -> int:
    """Multiplications per token in the model's largest matrix product, apart from the output layer."""
    vocabulary = {id(e.weight) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e is not None}
    return max((p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in vocabulary), default=0)
