"""Which runs there are, and what each is: read from the run directories and nothing else.

A run is asked for by its name in the list. No name, step or number that comes from outside becomes part of a path.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.board.curves import MetricsLog
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.recipe import read_recipe
from dapo_rl.runs.settings import flat

DEPTH = 3
"""How far below a directory runs are looked for: an ablation keeps its own in directories of their own."""
SCAN_SECONDS = 1.0
LARGEST_TEXT = 4 << 20
ROLLOUT = re.compile(r"step-(\d{1,12})\.parquet")


class NoSuchRunError(LookupError):
    pass


class Run:
    """One run directory, and what was read of it so far."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._real = path.resolve()
        self.log = MetricsLog(lambda: self.file("metrics.jsonl"))
        self._texts: dict[str, tuple[int, Any]] = {}
        self._rollouts: tuple[int, list[int]] = (-1, [])
        self._figures: tuple[int, dict[str, Any]] = (-1, {})
        self.cache: dict[Any, Any] = {}
        """What others keep about files of this run; they look after what makes it out of date."""

    def file(self, *parts: str) -> Path | None:
        """A file of the run; none where it is missing, or a link that leads out of the directory."""
        path = self.path.joinpath(*parts)
        return path if path.is_file() and path.resolve().is_relative_to(self._real) else None

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key."""
        return dict(self._remembered("config.yaml", lambda path: flat(read_recipe(path))) or {})

    def config(self) -> Config | None:
        """None where the settings are those of another version."""
        loaded: Config | None = self._remembered("config.yaml", Config.load, "config")
        return loaded

    def summary(self) -> dict[str, Any]:
        summary = self._remembered("summary.json", lambda path: json.loads(path.read_bytes()))
        return summary if isinstance(summary, dict) else {}

    def _remembered(self, name: str, read: Any, kind: str = "") -> Any:
        path = self.file(name)
        if path is None:
            return None
        try:
            stat = path.stat()
            known = self._texts.get(name + kind)
            if known is None or known[0] != stat.st_mtime_ns:
                value = read(path) if stat.st_size <= LARGEST_TEXT else None
                known = self._texts[name + kind] = (stat.st_mtime_ns, value)
        except (OSError, ValueError, UserError, RecursionError):
            return None
        return known[1]

    def rollout_steps(self) -> list[int]:
        """The steps whose groups were written down."""
        directory = self.path / "rollouts"
        try:
            changed = directory.stat().st_mtime_ns
            if self._rollouts[0] != changed:
                found = (ROLLOUT.fullmatch(name) for name in os.listdir(directory))
                self._rollouts = changed, sorted(int(match[1]) for match in found if match)
        except OSError:
            return []
        return self._rollouts[1]

    def rollout(self, step: int) -> Path | None:
        return self.file("rollouts", f"step-{step:06d}.parquet")

    def evaluations(self) -> dict[int, float]:
        """Held-out accuracy by step; the log has those after a step, the summary the one before the first too."""
        listed = self.summary().get("evaluations")
        found: dict[int, float] = {}
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("accuracy"), int | float):
                found[int(entry.get("step", 0))] = float(entry["accuracy"])
        steps, values = self.log.column("eval/accuracy")
        return found | {int(step): float(value) for step, value in zip(steps, values, strict=True)}

    @property
    def state(self) -> str:
        """`running`, `finished`, or `stopped`: by a signal, by an error, or with its machine."""
        if self._is_written():
            return "running"
        return "finished" if self.summary().get("finished") is True else "stopped"

    def _is_written(self) -> bool:
        path = self.file(".lock")
        try:
            owner = path.read_text().split() if path else []
        except (OSError, UnicodeDecodeError):
            return False
        if len(owner) != 2 or not owner[0].isdecimal():
            return False
        if owner[1] != socket.gethostname():
            return True  # its processes cannot be seen from here
        try:
            os.kill(int(owner[0]), 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True

    def row(self) -> dict[str, Any]:
        """The run in the table."""
        self.log.refresh()
        settings, summary, evaluations, config = self.settings(), self.summary(), self.evaluations(), self.config()
        figures = self._of_the_log()
        known = sorted(evaluations)
        seconds = summary.get("wall_seconds")
        config_file = self.file("config.yaml")
        return {
            "name": self.name,
            "state": self.state,
            "step": self.log.last_step,
            "steps": settings.get("train.steps"),
            "preset": settings.get("preset"),
            "model": settings.get("model.name"),
            "seed": settings.get("seed"),
            "techniques": [t.name for t in TECHNIQUES if t.is_on(config)] if config else None,
            "before": evaluations.get(0),
            "accuracy": evaluations[known[-1]] if known else None,
            **figures,
            "seconds": seconds if isinstance(seconds, int | float) else figures["seconds"],
            "started": config_file.stat().st_mtime if config_file else None,
            "rollouts": bool(self.rollout_steps()),
            "seen": self.log.offset,
        }

    def _of_the_log(self) -> dict[str, Any]:
        """The last steps in numbers, worked out once for a state of the log."""
        if self._figures[0] != self.log.offset:
            recent = {"reward": "reward/mean", "correct": "acc/mean"}
            recent |= {"length": "response_length/mean", "entropy": "actor/entropy"}
            totals = {"tokens": "sampling/tokens_generated", "seconds": "timing_s/step"}
            figures: dict[str, Any] = {key: self.log.latest(name, 10) for key, name in recent.items()}
            figures |= {key: self.log.total(name) for key, name in totals.items()}
            self._figures = self.log.offset, figures
        return self._figures[1]


class Catalogue:
    """The runs under the directories that the board was started with."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._known: dict[Path, Run] = {}
        self._runs: dict[str, Run] = {}
        self._looked = -SCAN_SECONDS
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Run]:
        with self._lock:
            if time.monotonic() - self._looked >= SCAN_SECONDS:
                self._runs = dict(self._scan())
                self._known = {run.path: run for run in self._runs.values()}
                self._looked = time.monotonic()
            return self._runs

    def find(self, name: str) -> Run:
        try:
            return self.runs()[name]
        except KeyError:
            raise NoSuchRunError(name) from None

    def _scan(self) -> Iterator[tuple[str, Run]]:
        taken: set[str] = set()
        seen: set[Path] = set()
        for root in self._roots:
            for path in _run_directories(root, DEPTH):
                if (real := path.resolve()) in seen:
                    continue
                seen.add(real)
                own = root.resolve().name
                name = own if path == root else path.relative_to(root).as_posix()
                if name in taken:
                    name = f"{own}/{name}"
                while name in taken:
                    name += "'"
                taken.add(name)
                run = self._known.get(path)
                if run is None or run.name != name:
                    run = Run(name, path)
                yield name, run


def _run_directories(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / "config.yaml").is_file():
        yield directory
        return
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _run_directories(directory / entry.name, depth - 1)
