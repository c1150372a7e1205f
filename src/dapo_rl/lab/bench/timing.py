"""Times rounds of work: after a warm-up, each repeat separately."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dapo_rl.lab.bench.machine import synchronize
from dapo_rl.lab.bench.memory import PeakMemory
from dapo_rl.lab.bench.workload import Measurement, Workload


def measure(run: Callable[[int], Any], work: Workload, device: torch.device, facts: dict[str, Any]) -> Measurement:
    """`run` takes the number of the round, so that each round can have its own prompts."""
    for i in range(work.warmup):
        run(i)
    seconds = []
    with PeakMemory(device) as memory:
        for i in range(work.warmup, work.rounds):
            synchronize(device)
            started = time.perf_counter()
            run(i)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
    return Measurement(tuple(seconds), memory.peak, memory.how, facts=facts)
