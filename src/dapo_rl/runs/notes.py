"""notes.jsonl: the notes that the display showed during a run, so that they outlive the terminal.

One line of JSON per note: `time` (seconds since 1970), `step` (the step in progress; before the first, the last one
done) and `text`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dapo_rl.base.files import atomic_write
from dapo_rl.base.quote import printable, shorten
from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config
from dapo_rl.runs.display import Display, Metrics

NAME = "notes.jsonl"
LONGEST_NOTE = 2000
"""Characters of a note; the middle of a longer one is cut."""
MOST_NOTES = 16 << 20
"""Size limit of the file in bytes. Later notes are shown but not recorded."""


class Notes:
    """The file, and the step that its next note belongs to. Nothing is written before `begin`, so that a run
    that is refused leaves the directory unchanged."""

    def __init__(self, directory: Path, step: Callable[[], int]) -> None:
        self._path, self._step = directory / NAME, step
        self._waiting: list[tuple[float, str]] | None = []

    def begin(self) -> None:
        """Writes the notes so far, and from now on each at once."""
        waiting, self._waiting = self._waiting or [], None
        for when, text in waiting:
            self._write(when, text)

    def add(self, text: str) -> None:
        if self._waiting is not None:
            self._waiting.append((time.time(), text))
        else:
            self._write(time.time(), text)

    def _write(self, when: float, text: str) -> None:
        """Appends a line. A failure to write it does not stop the run."""
        line = {"time": when, "step": self._step(), "text": printable(shorten(text, LONGEST_NOTE))}
        with suppress(OSError):
            # A signal handler may add a note while another is being written: a line is one unbuffered write.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
            try:
                if os.fstat(descriptor).st_size < MOST_NOTES:
                    os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)


def forget_notes_after(directory: Path, last_step: int) -> None:
    """Deletes the notes after `last_step`, and lines that are not notes, such as one truncated by a crash."""
    path = directory / NAME
    try:
        content = read_bytes(path, 2 * MOST_NOTES)
    except FileNotFoundError:
        return
    kept = b"".join(line + b"\n" for line in content.split(b"\n") if _is_kept(line, last_step))
    if kept != content:
        atomic_write(path, kept)


def _is_kept(line: bytes, last_step: int) -> bool:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return isinstance(step, int) and step <= last_step


class NotedDisplay(Display):
    """A display that also records its notes while `notes` is set."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.notes: Notes | None = None

    def start(self, total_steps: int, config: Config, model_description: str = "", steps_done: int = 0) -> None:
        self.display.start(total_steps, config, model_description, steps_done)

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        self.display.phase(name, done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        self.display.step(step, metrics)

    def note(self, text: str) -> None:
        if self.notes is not None:
            self.notes.add(text)
        self.display.note(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.display.finish(summary)

    def __enter__(self) -> Self:
        self.display.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.display.__exit__(*exception)
