"""The machine: its name, the precision it computes in, and what it moves and multiplies in a second."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CPU_BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}


def pick_dtype(wanted: str, device: torch.device) -> str:
    """`auto`: bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if wanted != "auto":
        return wanted
    return (
        "bfloat16"
        if device.type == "cuda" or CPU_BF16_FLAGS & set(_cpu_field("flags", "features").split())
        else ("float32")
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, **versions}
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


def bandwidth(device: torch.device) -> float:
    """Bytes read and written in a second by a large copy."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations in a second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _fastest(lambda: left @ right, device)


def _fastest(run: Callable[[], Any], device: torch.device, tries: int = 7) -> float:
    """The shortest of a few: the limit is what the machine can do at best."""
    seconds = []
    for _ in range(tries):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    """/proc does not name an Arm processor, lscpu does."""
    if name := _cpu_field("model name"):
        return name
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        listed = []
    names = [line.partition(":")[2].strip() for line in listed if line.startswith("Model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_field(*names: str) -> str:
    """The first processor's; empty where there is no /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip().lower() in names), "")
