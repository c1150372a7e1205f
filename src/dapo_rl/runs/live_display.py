"""The display on a terminal: progress, the current phase, and the latest metrics with their trend."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import RLock
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import count, duration, fixed, length, percent, sparkline
from dapo_rl.base.quote import printable
from dapo_rl.config import Config
from dapo_rl.outcomes import OUTCOMES
from dapo_rl.runs.display import Display, Metrics, Pace, PlainDisplay, headline, pretraining_line
from dapo_rl.runs.metric_text import closing_rows, dropped, engines, graded_score, kept_and_filled, number, ranks

TREND_STEPS = 30

ROWS: list[tuple[str, str, Callable[[float], str]]] = [
    ("reward", "reward/mean", fixed),
    ("accuracy", "acc/mean", fixed),
    ("held-out accuracy", "eval/accuracy", lambda share: percent(share, 1)),
    ("held-out score", "eval/reward", lambda score: fixed(score, 3)),
    ("entropy", "actor/entropy", fixed),
    ("response length", "response_length/mean", length),
    ("cut off", "response_length/clip_ratio", lambda share: percent(share, 1)),
    ("clipped high", "actor/pg_clipfrac_high", lambda share: percent(share, 2)),
    ("clipped low", "actor/pg_clipfrac_low", lambda share: percent(share, 2)),
    ("explained variance", "critic/vf_explained_var", fixed),
    ("value loss", "critic/vf_loss", lambda loss: fixed(loss, 3)),
    ("groups drawn", "sampling/drawn", count),
    ("tokens per second", "perf/throughput", count),
    ("seconds per step", "timing_s/step", lambda seconds: fixed(seconds, 1)),
]
"""Rows of the table: a label, the metric, and the format of its value."""


class LiveDisplay(Display):
    """A display that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        # Another thread draws the screen, and must not see a partial update.
        self._lock = RLock()
        self._live: Live | None = None
        self._head = ""
        self._pretraining: tuple[int, str] = (0, "")
        self._total = 0
        self._pace = Pace(0, 0, clock)
        self._spinner = Spinner("line" if console.options.ascii_only else "dots")
        self._phase: tuple[str, int | None, int | None] | None = None
        self._latest: dict[str, float | None] = {}
        self._trends: dict[str, deque[float]] = {name: deque(maxlen=TREND_STEPS) for _, name, _ in ROWS}

    def start(self, total_steps: int, config: Config, model_description: str = "", steps_done: int = 0) -> None:
        self.stop()
        self._head = headline(total_steps, config, model_description, steps_done)
        self._pretraining = config.pretrain_steps, pretraining_line(config)
        self._total = total_steps
        self._pace = Pace(total_steps, steps_done, self._clock)
        self._live = Live(self, console=self._console, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        with self._lock:
            self._phase = (printable(name), done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        with self._lock:
            self._pace.step(step, number(metrics, "timing_s/step"))
            self._latest = dict(metrics)
            for name, trend in self._trends.items():
                if not name.startswith("eval/") or metrics.get(name) is not None:
                    if name == "eval/reward" and graded_score(metrics) is None:
                        continue
                    trend.append(number(metrics, name))

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self._lock:
            self._phase = None
        self.stop()
        table = Table.grid(padding=(0, 2))
        for name, text in closing_rows(summary):
            table.add_row(Text(name, style="bold"), Text(printable(text), overflow="fold"))
        self._console.print()
        self._console.print(table)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __rich__(self) -> RenderableType:
        with self._lock:
            return Group(
                Text(self._head, style="bold", no_wrap=True, overflow="ellipsis"),
                self._progress(),
                self._phase_line(),
                *self._pretraining_lines(),
                self._table(),
                self._groups_line(),
                *(
                    Text(line, no_wrap=True, overflow="ellipsis")
                    for line in (engines(self._latest), ranks(self._latest))
                    if line
                ),
            )

    def _progress(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        left = duration(self._pace.seconds_left)
        grid.add_row(
            Text(f"step {self._pace.done}/{self._total}"),
            ProgressBar(total=max(self._total, 1), completed=self._pace.done),
            Text(f"{left} left" if left != "-" else ""),
        )
        return grid

    def _phase_line(self) -> RenderableType:
        if self._phase is None:
            return Text("")
        name, done, total = self._phase
        progress = "" if done is None else f" {done}" if total is None else f" {done}/{total}"
        self._spinner.update(text=Text(name + progress, style="cyan", no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _pretraining_lines(self) -> list[RenderableType]:
        steps, line = self._pretraining
        return [Text(line, style="yellow", no_wrap=True, overflow="ellipsis")] if self._pace.done < steps else []

    def _table(self) -> RenderableType:
        ramp = " .:-=+*#" if self._console.options.ascii_only else "▁▂▃▄▅▆▇█"
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=8)
        table.add_column(style="blue", no_wrap=True, overflow="crop", min_width=TREND_STEPS)
        for label, name, write in ROWS:
            trend = self._trends[name]
            if any(value == value for value in trend):
                table.add_row(label, write(trend[-1]), Text(sparkline(trend, ramp)))
        return table

    def _groups_line(self) -> RenderableType:
        kept, filled = kept_and_filled(self._latest)
        if kept != kept:
            return Text("")
        reasons = ", ".join(dropped(self._latest)) or "none"
        without = f"  {filled:.0f} {OUTCOMES['filled'].label}" if filled else ""
        return Text(f"groups  {kept:.0f} kept{without}  dropped: {reasons}")


def make_display(stream: TextIO | None = None) -> Display:
    """The display for standard output or another stream: live on a terminal, otherwise lines."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    return LiveDisplay(console) if stream.isatty() and not console.is_dumb_terminal else PlainDisplay(stream)
