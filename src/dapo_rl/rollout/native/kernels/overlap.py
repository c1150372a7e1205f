"""Programmatic dependent launch: on Hopper and later, a kernel is launched while the kernel before it still runs.

Its programs are then in place when their input is complete. Each kernel that takes `OVERLAP` first waits for the kernel
before it (`wait`), before it reads or writes anything, and then allows the next one to be launched.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

enabled = True


@cache
def _supported(device: torch.device) -> bool:
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device) -> dict[str, Any]:
    """The options with which to launch a kernel."""
    if enabled and _supported(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@triton.jit
def wait():
    gdc_wait()
    gdc_launch_dependents()
