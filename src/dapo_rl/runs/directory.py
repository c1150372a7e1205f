"""The run directory: the files that a run writes, and that a resumed run or a reader needs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dapo_rl.base.files import atomic_write, remove_leftovers, sync
from dapo_rl.base.json_value import json_value
from dapo_rl.base.lock import acquire
from dapo_rl.base.os_errors import reason_and_remedy
from dapo_rl.base.reading import read_bytes
from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.config import Config
from dapo_rl.errors import UnsavedError, UserError
from dapo_rl.runs.config_file import NAME, ConfigFile, settings_text
from dapo_rl.runs.error_file import forget_failure
from dapo_rl.runs.notes import forget_notes_after
from dapo_rl.runs.rollouts import GroupRow, write_table

MOST_LOG = 4 << 30
"""Size limit of metrics.jsonl in bytes: about a million steps."""
LARGEST_STEP, LARGEST = 2**53, 1e100
"""Limits well above the values of real runs; larger numbers would overflow in sums and plots."""
MOST_BYTES = 16 << 20
"""Size limit of a summary and of a line of metrics, which usually takes a few KiB."""
NOTHING = -1
"""The step to forget after so that nothing is left, not even the evaluation before the first step."""

LOG_LENGTH = "log.json"
"""The file of a checkpoint with the length of the log."""
AGAIN = "resume it with --resume (in Python: train(resume=True)), or name another with --run (run_dir)"


class RunDirectory:
    """The paths of a run directory, and functions that read and write its files. One process writes at a time."""

    def __init__(self, path: str | Path, again: str = AGAIN) -> None:
        """`again` is the advice given if the directory already contains a run."""
        self.path = Path(path)
        self._again = again
        self.config_path = self.path / NAME
        self.metrics_path = self.path / "metrics.jsonl"
        self.rollouts_path = self.path / "rollouts"
        self.checkpoints_path = self.path / "checkpoints"
        self.model_path = self.path / "model"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.png"
        self._unlogged: list[tuple[int, bytes]] = []
        """Lines of metrics that could not be written yet, with their steps."""

    @classmethod
    def create(cls, path: str | Path, config: Config) -> RunDirectory:
        """Creates the directory of a new run; raises if it already contains a run."""
        run = cls.prepare(path)
        run.begin(config)
        return run

    @classmethod
    def prepare(cls, path: str | Path, again: str = AGAIN) -> RunDirectory:
        """Creates a directory that can be locked; raises if it already contains a run."""
        run = cls(path, again)
        with run._writing():
            run.refuse_a_second_run()
            run.path.mkdir(parents=True, exist_ok=True)
        return run

    def begin(self, config: Config) -> None:
        """Starts a new run; raises if another process has started one in the meantime."""
        with self._writing():
            self.refuse_a_second_run()
            for path in (self.metrics_path, self.summary_path):
                path.unlink(missing_ok=True)
            self._remove_rollouts(self.rollout_steps())  # of a run that failed in its first step
            forget_notes_after(self.path, NOTHING)
            forget_failure(self.path)
            self.write_config(config)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Opens the directory of an existing run. config.yaml may be missing, because checkpoints contain a copy."""
        run = cls(path)
        try:
            if run.path.exists() and not run.path.is_dir():
                raise UserError(f"{path}: is not a directory; name another with --run")
            if not run.config_path.exists() and not run._has_checkpoints():
                raise UserError(
                    f"{path}: no run here (no config.yaml); start one without --resume, or name it with --run"
                )
        except OSError as error:  # for example, no permission
            raise UserError(f"{path}: cannot be read: {error.strerror}; name another with --run") from None
        return run

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the process that writes."""
        with self._writing():
            release = acquire(self.path)
        try:
            yield
        finally:
            release()

    def rollout(self, step: int) -> Path:
        return self.rollouts_path / rollout_name(step)

    def read_config(self) -> Config:
        """The settings in config.yaml; raises if any are missing."""
        return ConfigFile.read(self.config_path).whole_config()

    def write_config(self, config: Config) -> None:
        with saved_so_far(self.config_path):
            atomic_write(self.config_path, settings_text(config))

    def append_metrics(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Appends one line of JSON and flushes it to the operating system. A line that cannot be written, which raises
        an UnsavedError, is written with the next one."""
        line = {"step": step, **json_value(metrics)}
        self._unlogged.append((step, json.dumps(line, allow_nan=False).encode() + b"\n"))
        self.finish_log()

    def finish_log(self) -> None:
        """Writes the lines that could not be written before."""
        if self._unlogged:
            with saved_so_far(self.metrics_path):
                _append(self.metrics_path, b"".join(line for _, line in self._unlogged))
            self._unlogged = []

    def metrics_length(self) -> dict[str, int]:
        """The number of lines and bytes of the run log, after syncing it to disk."""
        self.finish_log()
        content = self._log()
        if content:
            with saved_so_far(self.metrics_path):
                sync(self.metrics_path)
                sync(self.path)
        return {"lines": content.count(b"\n"), "bytes": len(content)}

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dictionary per step; null is read as None. A truncated last line is skipped.

        Step 0 has only the evaluation before the first step. It is missing without held-out prompts, and in
        directories of versions that did not record it.
        """
        return [record for _, record in self._metric_lines()]

    def forget_after(
        self, last_step: int, length: Mapping[str, int] | None = None, logged: int | None = None
    ) -> str | None:
        """Deletes records after `last_step`, from which a run resumes, temporary files of a crash, and error.json.

        `logged` is the last step in the log, if that is an earlier one. `length` is the length of the log in the
        checkpoint of that step. Returns a note for the user if it differs.
        """
        for directory in (self.path, self.rollouts_path):
            with saved_so_far(directory):
                remove_leftovers(directory)
        self.truncate_metrics(last_step, logged)
        with saved_so_far(self.path):
            forget_notes_after(self.path, last_step)
            forget_failure(self.path)
        left = self.metrics_length()
        if length is None or left == dict(length):
            return None
        return (
            f"{self.metrics_path}: has {left['lines']} lines and {left['bytes']} bytes up to step {last_step}, but had "
            f"{length['lines']} and {length['bytes']} when the checkpoint was written: it has been changed since"
        )

    def check_may_start_again(self, steps: int) -> None:
        """Raises if a run without a checkpoint has something to lose: it has finished, or its log has more than `steps`
        steps, so that a checkpoint must have been lost."""
        logged = max((row["step"] for row in self.read_metrics()), default=0)
        if logged > steps or self.read_summary().get("finished"):
            raise UserError(
                f"{self.path}: the log reaches step {logged}, but there is no checkpoint to resume from; "
                "restore one from a copy, or start a new run"
            )

    def truncate_metrics(self, last_step: int, logged: int | None = None) -> None:
        """Deletes log lines and rollouts after `last_step`; log lines also after `logged`."""
        last_line = last_step if logged is None else logged
        self._unlogged = [(step, line) for step, line in self._unlogged if step <= last_line]
        kept = [line for line, record in self._metric_lines() if record["step"] <= last_line]
        content = b"".join(line + b"\n" for line in kept)
        if self._log() != content:
            with saved_so_far(self.metrics_path):
                atomic_write(self.metrics_path, content)
        self._remove_rollouts([step for step in self.rollout_steps() if step > last_step])

    def write_rollouts(self, step: int, rows: Sequence[GroupRow], keep: int | None = None) -> None:
        """Writes the groups of a step, then deletes all but the newest `keep` rollout files."""
        with saved_so_far(self.rollout(step)):
            self.rollouts_path.mkdir(exist_ok=True)
            write_table(self.rollout(step), step, rows)
        if keep is not None:
            self._remove_rollouts(self.rollout_steps()[:-keep])

    def rollout_steps(self) -> list[int]:
        """The steps with a rollout file, in order; files with other names are ignored."""
        files = self.rollouts_path.glob("step-*.parquet")
        return sorted(step for file in files if (step := rollout_step(file.name)) is not None and file.is_file())

    def _remove_rollouts(self, steps: Sequence[int]) -> None:
        for step in steps:
            with saved_so_far(self.rollout(step)):
                self.rollout(step).unlink(missing_ok=True)

    def read_summary(self) -> dict[str, Any]:
        """The summary; empty if it is missing or invalid. Resuming the run writes a new one."""
        try:
            summary: dict[str, Any] = json.loads(read_bytes(self.summary_path, MOST_BYTES))
            Summary.model_validate(summary)
        except (OSError, ValueError, RecursionError):
            return {}
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with saved_so_far(self.summary_path):
            atomic_write(self.summary_path, json.dumps(json_value(summary), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{self.path}: is not a directory; name another with --run") from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}; name another with --run") from None

    def refuse_a_second_run(self) -> None:
        if self._holds_a_run():
            raise UserError(f"{self.path}: already contains a run; {self._again}")

    def _holds_a_run(self) -> bool:
        """Whether there is something that a new run must not replace: a checkpoint, or a step in the log."""
        if self._has_checkpoints():
            return True
        try:
            return self.metrics_path.exists() and {row["step"] for row in self.read_metrics()} != {0}
        except UserError:  # not a log
            return True

    def _has_checkpoints(self) -> bool:
        return self.checkpoints_path.is_dir() and any(self.checkpoints_path.iterdir())

    def _metric_lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        lines = self._log().rstrip(b"\n").split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                record = parse_metrics(line)
            except ValueError as error:
                torn = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
                if torn and number == len(lines):  # a line truncated by a crash, or an empty file
                    return
                why = "it is not JSON" if torn else str(error)
                raise UserError(
                    f"{self.metrics_path}:{number}: not a line of metrics: {why}; delete the line"
                ) from None
            yield line, record

    def _log(self) -> bytes:
        try:
            return read_bytes(self.metrics_path, MOST_LOG)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UserError(f"{self.metrics_path}: cannot be read: {error.strerror}; move it away") from None


class SavedLog(Saved):
    lines: Count
    bytes: Count


class LogLength:
    """The checkpoint part that saves the length of the log, so that a resumed run can tell whether it was changed."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.loaded: dict[str, int] | None = None
        """The length in the checkpoint that was loaded last."""

    def save(self, directory: Path) -> None:
        write_state(directory / LOG_LENGTH, self._directory.metrics_length())

    def load(self, directory: Path) -> None:
        path = directory / LOG_LENGTH
        with restoring(path):
            self.loaded = parse_state(SavedLog, read_state(path)).model_dump()


def rollout_name(step: int) -> str:
    return f"step-{step:06d}.parquet"


def rollout_step(name: str) -> int | None:
    """The step of a rollout file; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{6,12})\.parquet", name)
    return int(match[1]) if match and rollout_name(int(match[1])) == name else None


def new_run_directory(name: str = "dapo") -> Path:
    """`runs/<name>-<time>`, with a number if two runs start in the same second."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = Path(f"{base}-{number}"), number + 1
    return path


def newest_run() -> Path:
    """The run in runs/ that was started or resumed last, by its config.yaml or, if that is lost, its checkpoints."""
    found: dict[Path, float] = {}
    for pattern, up in (("*/config.yaml", 0), ("*/checkpoints/step-*", 1)):
        for path in Path("runs").glob(pattern):
            with suppress(OSError):
                found.setdefault(path.parents[up], path.stat().st_mtime)
    if not found:
        raise UserError("--resume: there is no run in runs/; name one with --run")
    return max(found, key=lambda run: found[run])


@contextmanager
def saved_so_far(path: Path) -> Iterator[None]:
    """Turns a failure to write, for example on a full disk, into an UnsavedError."""
    try:
        yield
    except OSError as error:
        raise UnsavedError.of(f"{path}:", *reason_and_remedy(error)) from error


def _append(path: Path, content: bytes) -> None:
    """Appends all of the content to a file, or nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def parse_metrics(line: bytes) -> dict[str, Any]:
    """Parses a line of metrics.jsonl; raises ValueError with the reason if it is invalid."""
    record = None
    with suppress(RecursionError):
        record = json.loads(line) if len(line) <= MOST_BYTES else None
    if not isinstance(record, dict):
        raise ValueError("not a mapping of names to numbers")
    step = record.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise ValueError("'step' is not a step number")
    for name, value in record.items():
        if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):
            raise ValueError(f"{name[:80]!r} is not a number")
    return record


_Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class _EvaluationRecord(Saved):
    step: Count
    accuracy: _Number | None


class Summary(Saved):
    finished: bool
    steps: Count
    accuracy_before: _Number | None = None
    accuracy_after: _Number | None = None
    wall_seconds: _Number | None = None
    tokens: dict[str, Annotated[_Number, Field(ge=0)] | None] | None = None
    evaluations: list[_EvaluationRecord] | None = None
