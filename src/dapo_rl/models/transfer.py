"""Copies from the host to a device that do not wait for the device."""

from __future__ import annotations

from typing import Any

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
