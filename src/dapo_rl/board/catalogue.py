"""Finds the runs, ablations and evaluations in the directories that the board was started with.

Requests refer to one by its name in the list. No name, step or number from a request becomes part of a path.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from dapo_rl.board.ablation import BoardAblation
from dapo_rl.board.evaluation import BoardEvaluation
from dapo_rl.board.files import Identity, identity, shown_name
from dapo_rl.board.reports import BoardReport
from dapo_rl.board.run import BoardRun

DEPTH = 3
"""How many levels below a directory are searched for runs: an ablation has its runs in subdirectories."""
SCAN_SECONDS = 1.0
MOST_LOGS = 64
REPORTS: dict[str, type[BoardReport]] = {
    "plan.json": BoardAblation,
    "ablation.json": BoardAblation,
    "evaluation.json": BoardEvaluation,
}
"""The file that makes a directory one; a run's config.yaml takes precedence."""


class NoSuchRunError(LookupError):
    pass


class Catalogue:
    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._known: dict[str, BoardRun | BoardReport] = {}
        self._by_path: dict[str, BoardRun] = {}
        self._runs: dict[str, BoardRun] = {}
        self._reports: dict[str, BoardReport] = {}
        self._directories: dict[str, Identity] = {}
        self._logs: OrderedDict[Path, BoardRun] = OrderedDict()
        self._looked = -SCAN_SECONDS
        self._lock = threading.Lock()

    def runs(self, fresh_for: float = SCAN_SECONDS) -> dict[str, BoardRun]:
        with self._lock:
            if time.monotonic() - self._looked >= fresh_for:
                found: dict[str, Identity] = {}
                items = list(self._scan(found))
                self._runs = {item.name: item for item in items if isinstance(item, BoardRun)}
                self._reports = {item.name: item for item in items if isinstance(item, BoardReport)}
                self._directories = found
                self._known = {str(item.path): item for item in items}
                self._by_path = {run.real: run for run in self._runs.values()}
                self._looked = time.monotonic()
            return self._runs

    def find(self, name: str) -> BoardRun:
        if (run := self.runs().get(name)) is None:
            raise NoSuchRunError(name)
        return run

    def reports(self, fresh_for: float = SCAN_SECONDS) -> dict[str, BoardReport]:
        self.runs(fresh_for)
        return self._reports

    def report(self, name: str) -> BoardReport:
        if (report := self.reports().get(name)) is None:
            raise NoSuchRunError(name)
        return report

    def by_path(self) -> dict[str, BoardRun]:
        """The runs by their resolved paths, as of the last scan."""
        return self._by_path

    def directory(self, run: BoardRun) -> Identity | None:
        """The identity of the directory at the last scan; it changes when a file is added, removed or replaced."""
        return self._directories.get(str(run.path))

    def with_logs(self, names: Sequence[str]) -> list[BoardRun]:
        """Runs with up-to-date logs; the least recently used logs are closed."""
        runs = [self.find(name) for name in names]
        with self._lock:
            for run in runs:
                self._logs[run.path] = run
                self._logs.move_to_end(run.path)
            while len(self._logs) > MOST_LOGS:
                self._logs.popitem(last=False)[1].close_log()
        for run in runs:
            run.log.refresh()
        return runs

    def _scan(self, found: dict[str, Identity]) -> Iterator[BoardRun | BoardReport]:
        taken: set[str] = set()
        seen: set[str] = set()
        for root in self._roots:
            above = os.path.realpath(root)
            own = shown_name(os.path.basename(above))
            for path, make in self._directories_below(str(root), DEPTH, found):
                inner = os.path.relpath(path, root) if path != str(root) else ""
                real = os.path.join(above, inner) if inner else above  # links below a root are not followed
                if real in seen:
                    continue
                seen.add(real)
                name = shown_name(inner.replace(os.sep, "/")) or own
                if name in taken:
                    name = f"{own}/{name}"
                while name in taken:
                    name += "'"
                taken.add(name)
                item = self._known.get(path)
                if item is None or item.name != name or not isinstance(item, make):
                    item = make(name, Path(path), real)
                yield item

    def _directories_below(
        self, directory: str, depth: int, found: dict[str, Identity]
    ) -> Iterator[tuple[str, type[BoardRun] | type[BoardReport]]]:
        """Directories with a config.yaml or a report of any content. Unchanged runs are not scanned again."""
        now = identity(directory)
        if now is None:
            return
        if now == self._directories.get(directory) or os.path.lexists(os.path.join(directory, "config.yaml")):
            found[directory] = now
            yield directory, BoardRun
            return
        inner, report = _look_into(directory)
        if report is not None:
            yield directory, report
        if depth > 0:
            for name in inner:
                yield from self._directories_below(os.path.join(directory, name), depth - 1, found)


def _look_into(directory: str) -> tuple[list[str], type[BoardReport] | None]:
    try:
        with os.scandir(directory) as entries:
            listed = list(entries)
    except OSError:
        return [], None
    names = {entry.name for entry in listed}
    report = next((REPORTS[name] for name in REPORTS if name in names), None)
    inner = (e.name for e in listed if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    return sorted(inner), report
