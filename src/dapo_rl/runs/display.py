"""The display of a run: a live table on a terminal, otherwise one line per step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import count, counted, duration, fixed, length, percent, sparkline, write_line
from dapo_rl.base.quote import printable
from dapo_rl.config import Config, source_name
from dapo_rl.outcomes import OUTCOMES
from dapo_rl.runs.metric_text import (
    closing_rows,
    dropped,
    drops,
    engines,
    graded_score,
    has_critic,
    is_pretraining,
    kept_and_filled,
    number,
    other_drops,
    ranks,
)

Metrics = Mapping[str, float | None]
EVALUATING = "evaluating"
"""The phase of an evaluation."""
TELL_S = 15.0
"""Seconds between lines on the progress of an evaluation."""
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


class Display:
    """Shows a run; this one shows nothing. A context manager, so that the terminal is restored before an error is
    printed."""

    def start(self, total_steps: int, config: Config, model_description: str = "", steps_done: int = 0) -> None:
        pass

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """The current phase, and its progress."""

    def step(self, step: int, metrics: Metrics) -> None:
        pass

    def note(self, text: str) -> None:
        """A message that stays."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Pace:
    """Estimates the remaining time from the last steps."""

    def __init__(self, total_steps: int, steps_done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total_steps, clock
        self._last = clock()
        self._seconds: deque[float] = deque(maxlen=20)
        self.done = steps_done

    def step(self, step: int, reported_seconds: float) -> None:
        now = self._clock()
        # Work before the first step happens only once, so the first step counts with its own time.
        own = not self._seconds and reported_seconds == reported_seconds
        self._seconds.append(reported_seconds if own else now - self._last)
        self._last, self.done = now, step

    @property
    def seconds_per_step(self) -> float:
        return sum(self._seconds) / len(self._seconds) if self._seconds else float("nan")

    @property
    def seconds_left(self) -> float:
        return max(0, self._total - self.done) * self.seconds_per_step


class PlainDisplay(Display):
    """One aligned line per step, for pipes and log files; ASCII, at most 140 columns."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._total = self._groups = 0
        self._graded = False
        """Whether groups are compared by score."""
        self._pace = Pace(0, 0, clock)
        self._began = self._told = 0.0
        """When the evaluation began, and when it was last told how far it is."""

    def start(self, total_steps: int, config: Config, model_description: str = "", steps_done: int = 0) -> None:
        self._total, self._groups = total_steps, config.sampling.prompts_per_step
        self._graded = config.sampling.metric == "score"
        self._pace = Pace(total_steps, steps_done, self._clock)
        write_line(self._stream, headline(total_steps, config, model_description, steps_done))
        if steps_done < config.pretrain_steps:
            write_line(self._stream, pretraining_line(config))

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Prints the progress of a long evaluation; steps print their own lines."""
        if name != EVALUATING or done is None or total is None:
            return
        now = self._clock()
        if done == 0:
            self._began = self._told = now
        elif now - self._told >= TELL_S and done < total:
            self._told = now
            left = duration((now - self._began) / done * (total - done))
            write_line(self._stream, f"{EVALUATING}: {done} of {counted(total, 'problem')}, {left} left")

    def step(self, step: int, metrics: Metrics) -> None:
        self._pace.step(step, number(metrics, "timing_s/step"))
        self._graded |= number(metrics, "sampling/no_spread") > 0
        left = self._pace.seconds_left
        write_line(self._stream, step_line(step, self._total, self._groups, metrics, left, self._graded))
        for line in (other_drops(metrics, self._graded), engines(metrics), ranks(metrics)):
            if line:
                write_line(self._stream, f"  {line}")
        if "eval/accuracy" in metrics:
            write_line(self._stream, evaluation_line(step, self._total, metrics))

    def note(self, text: str) -> None:
        write_line(self._stream, text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        rows = closing_rows(summary)
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            write_line(self._stream, f"{name:<{width}}  {text}")


def headline(total_steps: int, config: Config, model_description: str, steps_done: int) -> str:
    model = f"{config.model.name} ({model_description})" if model_description else config.model.name
    source = source_name(config.data.train)
    steps = f"steps {steps_done + 1} to {total_steps}" if steps_done else counted(total_steps, "step")
    sampling = config.sampling
    shape = f"{counted(sampling.prompts_per_step, 'group')} of {sampling.group_size}"
    updates = f"{counted(config.updates_per_step, 'update')} per step"
    source = "rows in memory" if source == "in memory" else source  # data that the caller passed as an object
    return printable(f"{config.preset}: {model} on {source}, {steps}, {shape}, {updates}, seed {config.seed}")


def pretraining_line(config: Config) -> str:
    latest = "" if config.critic.pretrain_until is None else ", or earlier (critic.pretrain_until)"
    return f"value pre-training: the policy is trained from step {config.pretrain_steps + 1} on{latest}"


def evaluation_line(step: int, total: int, metrics: Metrics) -> str:
    accuracy = percent(number(metrics, "eval/accuracy"), 1)
    score = graded_score(metrics)
    scored = "" if score is None else f"  mean score {fixed(score, 3)}"
    return f"eval {step:>{len(str(total))}}/{total}  held-out accuracy {accuracy}{scored}"


def step_line(step: int, total: int, groups: int, metrics: Metrics, seconds_left: float, graded: bool = False) -> str:
    """The main metrics of a step, in columns that stay aligned from step to step. `graded`: groups are compared by
    score."""

    def value(name: str) -> float:
        return number(metrics, name)

    digits, width = len(str(total)), max(2, len(str(groups)))
    clip = f"+{percent(value('actor/pg_clipfrac_high'), 1)}/-{percent(value('actor/pg_clipfrac_low'), 1)}"
    clip = clip.replace("%", "", 1)
    right, wrong = value("sampling/all_correct"), value("sampling/all_wrong")
    alike = f"{fixed(right, 0):>{width}} right {fixed(wrong, 0):>{width}} wrong"
    if graded:
        alike = f"{fixed(value('sampling/no_spread'), 0):>{width}} no spread".ljust(len(alike))
    elif right == wrong == 0:  # scores may be graded, and then these words do not fit
        alike = f"{sum(drops(metrics).values()):>{width}.0f} dropped".ljust(len(alike))
    speed, seconds = f"{count(value('perf/throughput')):>5} tok/s", duration(value("timing_s/step"))
    explained = f"ev {fixed(value('critic/vf_explained_var')):>5}"
    of_policy = f"ent {fixed(value('actor/entropy')):>4} clip {clip:>10}"
    fields = [
        f"step {step:>{digits}}/{total}",
        f"acc {fixed(value('acc/mean')):>4} reward {fixed(value('reward/mean')):>5}",
        f"len {length(value('response_length/mean')):>5} cut {percent(value('response_length/clip_ratio')):>3}",
        f"{'value pre-training':<{len(of_policy)}}" if is_pretraining(metrics) else of_policy,
        f"{fixed(kept_and_filled(metrics)[0], 0):>{width}} kept {alike}",
        explained if has_critic(metrics) else speed,  # there is no room for both
        f"{seconds:>5} left {duration(seconds_left)}",
    ]
    # Very large numbers first shrink the gaps between columns, then drop the least important column.
    narrow, narrower = " ".join(fields), " ".join(" ".join(fields[:-2] + fields[-1:]).split())
    return next((line for line in ("  ".join(fields), narrow) if len(line) <= 140), narrower)


class LiveDisplay(Display):
    """A display that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        # Another thread draws the screen, and must not see a partial update.
        self._lock = RLock()
        self._live: Live | None = None
        self._head = ""
        self._pretraining = (0, "")
        """How many steps train the critic alone, and what is said about them."""
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
                missing = name.startswith("eval/") and metrics.get(name) is None
                if not missing and (name != "eval/reward" or graded_score(metrics) is not None):
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

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __rich__(self) -> RenderableType:
        with self._lock:
            pretrain_steps, pretraining = self._pretraining
            return Group(
                _one_line(self._head, "bold"),
                self._progress(),
                self._phase_line(),
                *([_one_line(pretraining, "yellow")] if self._pace.done < pretrain_steps else []),
                self._table(),
                self._groups_line(),
                *(_one_line(line) for line in (engines(self._latest), ranks(self._latest)) if line),
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
        self._spinner.update(text=_one_line(name + progress, "cyan"))
        return self._spinner

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


def _one_line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def make_display(stream: TextIO | None = None) -> Display:
    """The display for standard output or another stream: live on a terminal, otherwise lines."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    return LiveDisplay(console) if stream.isatty() and not console.is_dumb_terminal else PlainDisplay(stream)
