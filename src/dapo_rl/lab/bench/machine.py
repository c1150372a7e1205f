"""The machine: its name, memory bandwidth and matrix product rate, which limit every contender."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from dapo_rl.lab.bench.model_shapes import check_model
from dapo_rl.lab.bench.workload import Workload
from dapo_rl.models.load import compute_dtype, pick_device

TRIES, AT_LEAST_S = 3, 0.7
"""Minimum number of repetitions, and their minimum total time."""


def resolve_work(work: Workload) -> dict[str, Any]:
    """The device and dtype that `auto` resolves to, and the machine."""
    check_model(work.model)
    device = pick_device(work.device)
    dtype = str(compute_dtype(work.config().model, device)).removeprefix("torch.")
    return {"device": device.type, "dtype": dtype, "machine": describe_machine(device)}


def measure_limit(work: Workload) -> dict[str, Any]:
    """The same, and the machine's rates."""
    found = resolve_work(work)
    device, dtype = torch.device(found["device"]), getattr(torch, found["dtype"])
    rates = {"bandwidth_bytes_per_s": bandwidth(device), "matmul_flops_per_s": matmul_rate(device, dtype)}
    return found | rates


def describe_machine(device: torch.device) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, **versions}
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


def bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product, at the fastest of a few sizes."""

    def rate(n: int) -> float:
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        return 2 * n**3 / _fastest(lambda: left @ right, device)

    return max(map(rate, (4096, 8192) if device.type == "cuda" else (1024, 2048)))


def _fastest(run: Callable[[], Any], device: torch.device) -> float:
    """The shortest of several runs: the limit is the best that the machine can do."""
    seconds: list[float] = []
    while len(seconds) < TRIES or sum(seconds) < AT_LEAST_S:
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
    """The name of the processor. /proc does not name Arm processors, but lscpu does."""
    for command in (["cat", "/proc/cpuinfo"], ["lscpu"]):
        try:
            listed = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        fields = (line.partition(":") for line in listed.splitlines())
        if name := next((value.strip() for field, _, value in fields if field.strip().lower() == "model name"), ""):
            return name
    return platform.processor() or platform.machine()
