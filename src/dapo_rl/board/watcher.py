"""Watches all runs for all pages: a thread reads changed runs, and keeps rows and messages as JSON.

Requests read no files: a list returns the current rows, and a live page gets the messages after the last one it has.
The thread ends when there were no requests for a while, and the next request starts it again.
"""

from __future__ import annotations

import json
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dapo_rl.base.json_value import json_value
from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.files import Identity
from dapo_rl.board.run import BoardRun, broken_row

LOOK_SECONDS = 0.5
SHARE_OF_A_CORE, LONGEST_PAUSE = 0.2, 5.0
"""With many runs on a slow disk, the interval is longer than `LOOK_SECONDS`."""
PATIENCE_SECONDS, TELL_SECONDS = 0.3, 0.15
"""How long a list waits for rows that are not read yet, and how often a long look publishes its results so far."""
IDLE_SECONDS = 30.0
ALL_FILES_EVERY = 40
"""Interval, in looks, at which the files of finished runs are checked too, since they may be edited in place."""
MESSAGES_KEPT = 32


def dumps(content: Any) -> str:
    """JSON in ASCII, with null for numbers that are not finite."""
    return json.dumps(json_value(content), allow_nan=False, separators=(",", ":"))


def _event(message: str) -> bytes:
    return f"data: {message}\n\n".encode()


class Watcher:
    def __init__(self, catalogue: Catalogue, jobs: Callable[[], list[dict[str, Any]] | None]) -> None:
        """`jobs` returns the runs of the Lab, or None without one."""
        self._catalogue, self._jobs_of = catalogue, jobs
        self._seen: dict[str, tuple[BoardRun, tuple[Any, ...]]] = {}
        self._over: dict[str, Identity | None] = {}
        self._glance_seconds = 0.0
        self.looks = 0
        # Shared with requests:
        self._told = threading.Condition()
        self._rows: dict[str, str] = {}
        self._lists = {"reports": "[]", "jobs": dumps(jobs())}
        """Short lists that are sent as a whole when they change."""
        self._messages: deque[tuple[int, bytes]] = deque(maxlen=MESSAGES_KEPT)
        self._whole: tuple[int, bytes, bytes] = (-1, b"", b"")
        self.version = 0
        """The number of messages; 0 until the first look has published something."""
        self._thread: threading.Thread | None = None
        self._is_complete = False
        self._asked = 0.0
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends the thread, and with it the live connections: the board exits."""
        self._closed.set()
        with self._told:
            self._told.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def rows(self) -> bytes:
        """All rows; during a long first look, some of them as `first_row` at first."""
        self.ask()
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._told:
            self._told.wait_for(lambda: self.version > 0 or self.is_closed, IDLE_SECONDS)
            self._told.wait_for(lambda: self._is_complete or self.is_closed, max(0.0, deadline - time.monotonic()))
            return self._everything()[1]

    def since(self, version: int) -> tuple[int, list[bytes]]:
        """The messages after a version, or one with everything if the page is new or has missed too many."""
        self.ask()
        with self._told:
            if version == self.version:
                return version, []
            missed = [text for number, text in self._messages if number > version]
            if version == 0 or len(missed) < self.version - version:
                missed = [self._everything()[0]]
            return self.version, missed

    def ask(self) -> None:
        """Records a request, and starts the thread if necessary."""
        with self._told:
            self._asked = time.monotonic()
            if self._thread is None and not self.is_closed:
                self._is_complete = False
                self._thread = threading.Thread(target=self._go_on_looking, name="watch", daemon=True)
                self._thread.start()

    def _everything(self) -> tuple[bytes, bytes]:
        """A message and a list with all rows, cached for the current version."""
        if self._whole[0] != self.version:
            runs = ",".join(self._rows.values())
            tail = _members(self._lists)
            whole = f'{{"whole":true,"runs":[{runs}],"gone":[]{tail}}}'
            self._whole = self.version, _event(whole), f'{{"runs":[{runs}]{tail}}}'.encode()
        return self._whole[1:]

    def _go_on_looking(self) -> None:
        while not self.is_closed:
            is_behind = False
            try:
                is_behind = self.look()
            except Exception:  # a bug; the next look may succeed
                traceback.print_exc()
            with self._told:
                self._is_complete = True
                self._told.notify_all()
                if time.monotonic() - self._asked > IDLE_SECONDS:
                    self._thread = None
                    return
            pause = max(LOOK_SECONDS, min(LONGEST_PAUSE, self._glance_seconds / SHARE_OF_A_CORE))
            self._closed.wait(0.01 if is_behind else pause)

    def look(self) -> bool:
        """Reads and publishes changes; returns whether a log has more to read."""
        self.looks += 1
        began = time.monotonic()
        runs = self._catalogue.runs(0.0)
        stale = [run for number, run in enumerate(runs.values()) if self._has_changed(run, number)]
        self._glance_seconds = time.monotonic() - began
        rows: dict[str, str] = {}
        waiting = {run.name: run for run in sorted(stale, key=lambda run: -(run.started or 0.0))}
        told = time.monotonic()
        for name in list(waiting):
            rows[name] = dumps(self._read(waiting.pop(name)))
            if time.monotonic() - told > TELL_SECONDS:
                unread = {n: dumps(run.first_row()) for n, run in waiting.items() if n not in self._rows}
                self._tell(runs, rows | unread)
                rows, told = {}, time.monotonic()
        for name in [name for name in self._seen if name not in runs]:
            del self._seen[name]
            self._over.pop(name, None)
        by_path = self._catalogue.by_path()
        reports = [report.row(by_path) for report in self._catalogue.reports(math.inf).values()]
        self._tell(runs, rows, {"reports": dumps(reports), "jobs": dumps(self._jobs_of())})
        return any(run.is_behind for run in stale)

    def _has_changed(self, run: BoardRun, number: int) -> bool:
        known = self._seen.get(run.name)
        if known is None or known[0] is not run:
            self._over.pop(run.name, None)
            return True
        if (self.looks + number) % ALL_FILES_EVERY and run.name in self._over:
            return self._over[run.name] != self._catalogue.directory(run)
        return run.is_behind or known[1] != run.glance()

    def _read(self, run: BoardRun) -> dict[str, Any]:
        """The row of a run; a failure affects only this row."""
        directory = self._catalogue.directory(run)
        self._over.pop(run.name, None)
        self._seen[run.name] = run, run.glance()
        try:
            row = run.row()
            if run.is_over and not run.is_behind:
                self._over[run.name] = directory
                run.rest()
        except Exception as error:
            return broken_row(run, error)
        return row

    def _tell(self, runs: Mapping[str, BoardRun], rows: dict[str, str], lists: Mapping[str, str] | None = None) -> None:
        """Publishes a message with the changes; rows keep the order of the runs."""
        with self._told:
            changed = {name: row for name, row in rows.items() if self._rows.get(name) != row}
            gone = [name for name in self._rows if name not in runs]
            new = {name: text for name, text in (lists or {}).items() if self._lists[name] != text}
            if not changed and not gone and not new and self.version > 0:
                return
            now = self._rows | changed
            self._rows = {name: now[name] for name in runs if name in now}
            self._lists |= new
            self.version += 1
            runs_changed = ",".join(changed.values())
            message = f'{{"whole":false,"runs":[{runs_changed}],"gone":{dumps(gone)}{_members(new)}}}'
            self._messages.append((self.version, _event(message)))
            self._told.notify_all()


def _members(lists: Mapping[str, str]) -> str:
    return "".join(f',"{name}":{text}' for name, text in lists.items())
