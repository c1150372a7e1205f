"""Peak memory of a piece of work."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from dapo_rl.models.reserved_memory import peak_bytes, reset_peak

PERIOD_S = 0.02


class PeakMemory:
    """On a GPU, the memory of torch's tensors and of the engine; on a CPU, the resident memory of the process, sampled
    every 20 ms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0
        self.how = "allocated on the GPU" if device.type == "cuda" else "resident in the process"

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            reset_peak(self._device)
        else:
            self.peak = _resident()
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
