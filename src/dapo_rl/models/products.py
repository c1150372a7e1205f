"""Which library multiplies matrices on a CPU."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def quick_products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The faster library for a model's products.

    On 64-bit Arm torch hands float32 products to oneDNN. For small matrices that takes up to 17 times as long as the
    BLAS does (64 × 128 × 128 on two cores: 0.74 ms and 0.04 ms), and for large ones as long.
    """
    if device.type == "cpu" and dtype == torch.float32 and platform.machine() in ("aarch64", "arm64"):
        flags: AbstractContextManager[Any] = torch.backends.mkldnn.flags(enabled=False)
        return flags
    return nullcontext()
