"""Progress of an evaluation on stderr: a bar on a terminal, otherwise a line for each tenth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from dapo_rl.base.format import count, counted, duration
from dapo_rl.base.quote import printable


class EvalProgress:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._done = self._total = self._tokens = self._new = 0
        self._started = 0.0

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    @contextmanager
    def of(self, what: str, total: int, done: int = 0) -> Iterator[None]:
        """Tracks the problems of one model; `done` of them are finished already."""
        self._total, self._done, self._tokens, self._new = total, done, 0, 0
        self._started = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[speed]}", markup=False),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self._console, transient=True) as self._bars:
            self._task = self._bars.add_task(printable(what), total=total, completed=done, speed="")
            yield
        self._bars = None

    def advance(self, tokens: int) -> None:
        """Counts one more problem; `tokens` is the length of its responses."""
        before, self._done = self._done, self._done + 1
        self._new += 1
        self._tokens += tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        speed = f"{count(self._tokens / seconds)} tokens/s"
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done, speed=speed)
        elif 10 * self._done // self._total > 10 * before // self._total:
            left = duration(seconds / self._new * (self._total - self._done))
            self.note(f"{self._done} of {counted(self._total, 'problem')}, {speed}, {left} left")
