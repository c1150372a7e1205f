"""Which library multiplies matrices on a CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quick_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The faster library for a model's products.

    On 64-bit Arm torch hands float32 products to oneDNN. For small matrices that takes up to 17 times as long as the
    BLAS does (64 × 128 × 128 on two cores: 0.74 ms and 0.04 ms), and for large ones as long.
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
