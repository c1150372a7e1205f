"""What a judge has replied and how often it was asked, on disk.

Both files only grow, by whole lines in one write each, so that a run that was killed at any moment finds all replies
again. A line that was cut off, or is damaged, is skipped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_rl.base.home import expanded
from dapo_rl.base.os_errors import reason_and_remedy
from dapo_rl.errors import VerifierStopError
from dapo_rl.rewards.judge.judge_file import JudgeSettings


class JudgeRecord:
    """The replies by the requests they answer, and the calls of a run."""

    def __init__(self, settings: JudgeSettings, file: str, name: str) -> None:
        """`file` describes the judge, `name` is that of its curve."""
        self._settings, self._file, self._name = settings, file, name
        self._lock = threading.Lock()
        self._replies: dict[str, str] = {}
        self._calls = self._tokens = 0
        self._logged_calls = self._logged_tokens = 0
        """Those of them that are in the run directory."""
        self._cache: _Lines | None = None
        self._ledger: _Lines | None = None
        self.stopped = ""
        """Why no call is made any more."""
        if isinstance(settings.cache, str):
            self._use_cache(expanded(settings.cache))

    def begin(self, directory: Path) -> None:
        """Continues with what the run directory has, also if this process has written it."""
        with self._lock:
            self.stopped = ""
            self._ledger = _Lines(directory / "judge" / f"{self._name}.calls.jsonl", self._file)
            rows = list(self._ledger.read())
            calls = sum(row.get("call") is True for row in rows)
            tokens = sum(n for row in rows if type(n := row.get("tokens")) is int)
            self._calls += calls - self._logged_calls
            self._tokens += tokens - self._logged_tokens
            self._logged_calls, self._logged_tokens = calls, tokens
        if self._settings.cache is True:
            self._use_cache(directory / "judge")

    def _use_cache(self, directory: Path) -> None:
        with self._lock:
            before = dict(self._replies)
            self._cache = _Lines(directory / f"{self._name}.jsonl", self._file)
            for row in self._cache.read():
                if isinstance(key := row.get("key"), str) and isinstance(reply := row.get("reply"), str):
                    self._replies[key] = reply
            for key in before.keys() - self._replies.keys():
                self._cache.append({"key": key, "reply": before[key]})

    def reply(self, key: str) -> str | None:
        with self._lock:
            return self._replies.get(key)

    def forget_replies(self) -> None:
        """The model has other weights now."""
        with self._lock:
            self._replies.clear()

    def begin_call(self) -> None:
        """Counts a call that is about to be made, or raises VerifierStopError."""
        self.reserve_call()
        self.log_call()

    def reserve_call(self) -> None:
        """Counts a call in this process alone, or raises VerifierStopError."""
        budget = self._settings.budget
        with self._lock:
            for key, spent, limit in (("calls", self._calls, budget.calls), ("tokens", self._tokens, budget.tokens)):
                if limit is not None and spent >= limit:
                    line = f"{self._file}: budget.{key}: {spent:,} {key} are spent, and more are needed; raise it"
                    raise VerifierStopError(f"{line}, and resume")
            self._calls += 1

    def release_call(self) -> None:
        """A call that was reserved has been interrupted."""
        with self._lock:
            self._calls -= 1

    def log_call(self) -> None:
        """Writes a call that is counted into the run directory."""
        with self._lock:
            if self._ledger is not None:
                self._ledger.append({"call": True})
                self._logged_calls += 1

    def end_call(self, key: str, reply: str | None, tokens: int) -> None:
        """Keeps a reply, unless it is None."""
        with self._lock:
            if tokens:
                self._tokens += tokens
                if self._ledger is not None:
                    self._ledger.append({"tokens": tokens})
                    self._logged_tokens += tokens
            if reply is not None and key not in self._replies:
                self._replies[key] = reply
                if self._cache is not None:
                    self._cache.append({"key": key, "reply": reply})


def key_of(body: dict[str, Any]) -> str:
    """The name of a request in the cache."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class _Lines:
    """A file of JSON lines that several runs may append to."""

    def __init__(self, path: Path, file: str) -> None:
        self._path, self._file = path, file
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> Iterator[dict[str, Any]]:
        with self._errors():
            if not self._path.exists():
                return
            data = self._path.read_bytes()
        if data and not data.endswith(b"\n"):  # a kill cut the last line off
            self._write(b"\n")
        for line in data.splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row

    def append(self, row: dict[str, Any]) -> None:
        self._write(json.dumps(row).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._errors():
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(file, data) < len(data):  # the disk is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason, remedy = reason_and_remedy(error)
            more = f"; {remedy}" if remedy else ""
            raise VerifierStopError(f"{self._file}: {self._path} cannot be used: {reason}{more}") from None
