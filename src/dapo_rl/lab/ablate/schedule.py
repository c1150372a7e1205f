"""Runs the remaining runs of an ablation, several at a time; a failure does not stop the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dapo_rl.lab.ablate.display import AblationDisplay
from dapo_rl.lab.ablate.runs import ArmRun

POLL_SECONDS = 0.2


def run_all(runs: Sequence[ArmRun], jobs: int, display: AblationDisplay) -> int | None:
    """Returns the signal that stopped it, if any; started runs are saved first."""
    waiting = [run for run in runs if run.state == "waiting"]
    running: list[ArmRun] = []
    threads = max(1, _cores() // jobs)
    with _signals() as received:
        told = 0
        try:
            while running or (waiting and not received):
                while waiting and len(running) < jobs and not received:
                    run = waiting.pop(0)
                    run.start(threads)
                    running.append(run)
                    display.changed(run)
                while told < len(received):
                    told += 1
                    display.note(_STOPPING[min(told, len(_STOPPING)) - 1])
                    for run in running:
                        run.interrupt(told)
                for run in running:
                    if run.poll(stopping=bool(received)):
                        display.changed(run)
                running = [run for run in running if run.state == "running"]
                if running:
                    time.sleep(POLL_SECONDS)
        finally:  # leave no process behind on an error
            for run in running:
                run.interrupt(1)
            for run in running:
                run.wait()
    return received[0] if received else None


_STOPPING = (
    "stopping: runs save and stop; press Ctrl-C again to stop immediately",
    "stopping immediately",
    "killed",
)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals instead of handling them."""
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(number)

    # SIGHUP: if the terminal is closed, the runs, which have their own sessions, would continue alone.
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
