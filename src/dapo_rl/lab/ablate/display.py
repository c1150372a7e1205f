"""The display of an ablation: a table of arms and seeds on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dapo_rl.base.format import counted, duration, percent, write_line
from dapo_rl.base.quote import printable
from dapo_rl.base.table import figure_table
from dapo_rl.lab.ablate.plan import AblationPlan
from dapo_rl.lab.ablate.runs import ArmRun, RunObserver


class AblationPace:
    """Estimates the remaining time from the steps done so far."""

    def __init__(self, runs: Sequence[ArmRun], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._began, self._before = clock(), self._done()

    @property
    def ended(self) -> int:
        return sum(run.state in ("done", "failed") for run in self._runs)

    @property
    def seconds_left(self) -> float:
        made = self._done() - self._before
        left = sum(run.steps - run.step for run in self._runs if run.state in ("waiting", "running"))
        return left * (self._clock() - self._began) / made if made > 0 else float("nan")

    def _done(self) -> int:
        return sum(run.step for run in self._runs)


class PlainAblationDisplay:
    """Prints a line when a run starts, is evaluated, and ends."""

    def __init__(self, stream: TextIO, runs: Sequence[ArmRun]) -> None:
        self._stream, self._runs, self._pace = stream, runs, AblationPace(runs)
        self._last: dict[str, tuple[str, float | None]] = {}

    def changed(self, run: ArmRun) -> None:
        state = (run.state, run.accuracy)
        if self._last.get(run.name) == state:
            return
        began = run.name not in self._last
        self._last[run.name] = state
        left = duration(self._pace.seconds_left)
        how_far = f"[{self._pace.ended}/{len(self._runs)}]"
        accuracy = f", held-out accuracy {percent(run.accuracy, 1)}" if run.accuracy is not None else ""
        if run.state == "running":
            what = f"step {run.step}/{run.steps}{accuracy}" if run.step or not began else "started"
        else:
            what = f"{run.state}{f': {run.message}' if run.message else f' at step {run.step}{accuracy}'}"
        rest = f", {left} left" if left not in ("-", "0.0s") else ""
        write_line(self._stream, f"{how_far} {run.name}: {what}{rest}")

    def note(self, text: str) -> None:
        write_line(self._stream, text)


class LiveAblationDisplay:
    """A table of arms and seeds, redrawn in place; failures scroll above it."""

    def __init__(self, console: Console, plan: AblationPlan, runs: Sequence[ArmRun]) -> None:
        self._console, self._plan, self._runs, self._pace = console, plan, runs, AblationPace(runs)

    def changed(self, run: ArmRun) -> None:
        if run.state == "failed":
            self.note(f"{run.name} failed: {run.message}")

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def __rich__(self) -> RenderableType:
        left = duration(self._pace.seconds_left)
        head = f"{self._pace.ended} of {counted(len(self._runs), 'run')}" + (f", {left} left" if left != "-" else "")
        table = figure_table("", *(f"seed {seed}" for seed in self._plan.seeds))
        for column in table.columns:
            column.overflow = "fold"
        for arm in self._plan.with_own_runs():
            cells = [_cell(run) for run in self._runs if run.arm.name == arm.name]
            table.add_row(Text(printable(arm.label)), *cells)
        return Group(Text(head, style="bold"), table)


def _cell(run: ArmRun) -> Text:
    accuracy = percent(run.accuracy, 1) if run.accuracy is not None else ""
    if run.state == "waiting":
        return Text("waiting" if run.step == 0 else f"waiting at {run.step}/{run.steps}", style="dim")
    if run.state == "done":
        return Text(f"done  {accuracy:>5}", style="green")
    style = {"running": "cyan", "failed": "bold red", "stopped": "yellow"}[run.state]
    what = f"{run.step}/{run.steps}" if run.state == "running" else run.state
    return Text(f"{what}  {accuracy:>5}", style=style)


@contextmanager
def ablation_display(plan: AblationPlan, runs: Sequence[ArmRun]) -> Iterator[RunObserver]:
    """Live on a terminal, which is restored at the end; otherwise lines."""
    console = Console(file=sys.stdout)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield PlainAblationDisplay(sys.stdout, runs)
        return
    display = LiveAblationDisplay(console, plan, runs)
    with Live(display, console=console, refresh_per_second=4):
        yield display
