"""Times rounds of work after a warm-up, and measures the peak memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dapo_rl.lab.bench.machine import synchronize
from dapo_rl.lab.bench.workload import Measurement, Workload
from dapo_rl.models.reserved_memory import peak_bytes, reset_peak

PERIOD_S = 0.02


def measure(run: Callable[[int], Any], work: Workload, device: torch.device, facts: dict[str, Any]) -> Measurement:
    """`run` takes the number of the round, so that each round can have its own prompts."""
    for i in range(work.warmup):
        run(i)
    seconds = []
    memory = PeakMemory(device)
    memory.start()
    for i in range(work.warmup, work.rounds):
        synchronize(device)
        started = time.perf_counter()
        run(i)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    memory.stop()
    return Measurement(tuple(seconds), memory.peak, memory.how, facts=facts)


class StepClock:
    """Records when a trainer's steps end, and the peak memory of those after the warm-up."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self._work, self._device = work, device
        self.memory = PeakMemory(device)
        self.ends: list[float] = []
        """The start of the training, then the end of each step."""

    def step_ended(self, step: int) -> None:
        """`step` is 0 when the training starts."""
        synchronize(self._device)
        self.ends.append(time.perf_counter())
        if step == self._work.warmup:
            self.memory.start()
        if step == self._work.rounds:
            self.memory.stop()

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self.ends)]


class PeakMemory:
    """On a GPU, the memory of torch's tensors and of the engine; on a CPU, the resident memory of the process, sampled
    every 20 ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0
        self.how = "allocated on the GPU" if device.type == "cuda" else "resident in the process"

    def start(self) -> None:
        if self._device.type == "cuda":
            reset_peak(self._device)
        else:
            self.peak = _resident()
            self._watcher.start()

    def stop(self) -> None:
        if self._device.type == "cuda":
            self.peak = peak_bytes(self._device)
        else:
            self._done.set()
            self._watcher.join()
            self.peak = max(self.peak, _resident())

    def _watch(self) -> None:
        while not self._done.wait(PERIOD_S):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux: use the peak since the start
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
