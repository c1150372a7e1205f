"""Checkpoints are written to a temporary directory, fsynced, renamed, and verified when read; the last `keep` stay.

A save copies the state and returns; another thread writes the copy while the run continues. A step can be saved again,
with more of the next one sampled: the new checkpoint replaces the previous one when it is complete, and shares the
files that have not changed. A checkpoint that cannot be written does not end the run: a note says so, and the next one
is tried.

`checkpoints/step-N/` contains the files of each part of the run, the settings (`config.yaml`), and `manifest.json`
with the size and SHA-256 of every other file, and a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from safetensors import SafetensorError

from dapo_rl.base.files import directory_beside, remove_directory, remove_leftovers, sync
from dapo_rl.base.hashing import CancelledError, DeferredWrite, Digests, IsCancelled, file_sha256
from dapo_rl.base.os_errors import reason_and_remedy
from dapo_rl.base.quote import shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config
from dapo_rl.errors import NonFiniteError, RankLostError, UnsavedError, UserError
from dapo_rl.runs.config_file import NAME as SETTINGS
from dapo_rl.runs.config_file import ConfigFile, settings_text
from dapo_rl.runs.write_errors import WriteErrors

MANIFEST = "manifest.json"
FORMAT = 2
"""The version of the layout, stored in the manifest; a checkpoint in another layout is rejected."""
MOST_BYTES = 16 << 20
"""Size limit of a manifest."""
WHAT = "checkpoints"
"""Their name among what a run cannot write."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
LONG_WAIT = 1.0
"""Seconds after which a save that waits for the previous one says so."""


class Part(Protocol):
    """A part of a run's state. It writes and reads its own files in a checkpoint's directory."""

    def save(self, directory: Path) -> DeferredWrite | None:
        """Writes its files. A large part copies its state instead, and returns a function that writes the copy."""
        ...

    def load(self, directory: Path) -> None:
        """Raises a UserError that names a file that does not belong to this run, and a NonFiniteError if the state is
        not finite. After a NonFiniteError the part is unchanged, and the run tries the previous checkpoint."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path

    def damage(self, *, contents: bool = True) -> str | None:
        """What is wrong with its files, or None; `contents=False` checks only their sizes."""
        try:
            manifest = self._manifest()
            if manifest["step"] != self.step:
                return f"{MANIFEST} belongs to step {shown(manifest['step'])}"
            for name, expected in manifest["files"].items():
                file = self.path / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != expected["size"]:
                    return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
                if contents and file_sha256(file) != expected["sha256"]:
                    return f"the checksum of {name} is wrong"
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except _DAMAGED:
            return f"{MANIFEST} is damaged"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return None

    def digests(self) -> Digests:
        return {name: entry["sha256"] for name, entry in self._manifest()["files"].items()}

    def _manifest(self) -> dict[str, Any]:
        """Raises a ValueError or one of its like if it is damaged."""
        manifest: dict[str, Any] = json.loads(read_bytes(self.path / MANIFEST, MOST_BYTES))
        if manifest["sha256"] != _own_checksum(manifest):
            raise ValueError
        return manifest

    def check_format(self) -> None:
        """Raises if the checkpoint is intact but has another layout. The run does not fall back to an older one."""
        try:
            written = self._manifest().get("format")
        except (OSError, *_DAMAGED):
            return  # `damage` reports this
        if written != FORMAT:
            newer = type(written) is int and written > FORMAT
            raise UserError(
                f"{self.path}: was written by {'a newer' if newer else 'an older'} version of dapo-rl, in another "
                "layout; resume it with that version, or start a new run"
            )

    def settings(self) -> ConfigFile | None:
        """The settings of the run when it wrote this checkpoint, or None if they are damaged."""
        if self.damage(contents=False):
            return None
        try:
            file = ConfigFile.read(self.path / SETTINGS)
        except UserError:
            return None
        return file if file.is_whole else None


class Checkpoints:
    """The checkpoints of a run. As a context manager, it waits at its end for the one that is being written."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        note: Callable[[str], None] = lambda line: None,
        unsaved: WriteErrors | None = None,
    ) -> None:
        """`note` is told if a save had to wait; `unsaved` if a checkpoint cannot be written."""
        self._directory, self._keep, self._note = directory, keep, note
        self._unsaved = unsaved or WriteErrors(note)
        self._writing: _Writing | None = None
        self.failure: UnsavedError | None = None
        """Why the checkpoint that was tried last could not be written; None if it could."""
        self._not_removed: str | None = None
        self._told_not_removed: str | None = None
        self._damaged: set[Path] = set()
        """Checkpoints whose contents were found to be damaged. Contents are read only once, by `restore`."""
        self._current: Checkpoint | None = None
        """The checkpoint that was restored, or written last."""

    def all(self) -> list[Checkpoint]:
        """All directories with the name of a checkpoint, oldest first.

        `step-N.old` is a checkpoint that was being replaced when the process ended.
        """
        if not self._directory.is_dir():
            return []
        entries = list(self._directory.iterdir())
        named = [(re.fullmatch(r"step-(\d+)(\.old)?", path.name), path) for path in entries if path.is_dir()]
        found = [(int(match[1]), match[2] is None, path) for match, path in named if match]
        return [Checkpoint(step, path) for step, _, path in sorted(found)]

    def latest(self) -> Checkpoint | None:
        return next((checkpoint for checkpoint in reversed(self.all()) if self._looks_whole(checkpoint)), None)

    def restore(self, parts: Sequence[Part], note: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """Loads the newest checkpoint that is intact and finite into the parts.

        Calls `note` with a line for each damaged checkpoint. Returns None if there is no checkpoint, and raises if all
        are damaged; they are not deleted.
        """
        damaged: list[str] = []
        for checkpoint in reversed(self.all()):
            checkpoint.check_format()
            damage = checkpoint.damage() or _load(parts, checkpoint.path)
            if damage is None:
                self._current = checkpoint
                return checkpoint
            damaged.append(f"{checkpoint.path}: {damage}")
            self._damaged.add(checkpoint.path)
            note(damaged[-1])
        if damaged:
            raise UserError(
                f"every checkpoint is damaged: {'; '.join(damaged)}; restore one from a copy, or start a new run"
            )
        return None

    def settings(self) -> ConfigFile | None:
        """The settings of the newest checkpoint with readable settings."""
        for checkpoint in reversed(self.all()):
            checkpoint.check_format()
            if file := checkpoint.settings():
                return file
        return None

    def save(self, step: int, parts: Sequence[Part], config: Config | None = None) -> Checkpoint:
        """Writes a checkpoint, and returns when it is complete; raises an UnsavedError if it cannot be written."""
        self.start(step, parts, config)
        self.wait()
        if self.failure is not None:
            raise self.failure
        return self._checkpoint(step)

    def start(
        self, step: int, parts: Sequence[Part], config: Config | None = None, unchanged: Sequence[Part] = ()
    ) -> None:
        """Copies the state of the parts, and writes it in the background.

        Waits for the previous checkpoint. The parts can change as soon as this returns.
        `unchanged` are parts that change only with the step: if the current checkpoint is of the same step, the new one
        has links to their files.
        """
        self._wait_for_previous()
        checkpoint, known = self._checkpoint(step), self._known(step)
        if known is not None:
            parts = [part for part in parts if not any(part is same for same in unchanged)]
        try:
            with _one_line(checkpoint), ExitStack() as stack:
                with self._removing():
                    remove_leftovers(self._directory)
                old = self._directory / f"step-{step}.old"
                draft = stack.enter_context(directory_beside(checkpoint.path, old=old))
                writes = [write for part in parts if (write := part.save(draft)) is not None]
                if config is not None:
                    (draft / SETTINGS).write_bytes(settings_text(config))
                # From here on, the thread removes the draft on an error, or publishes it.
                publishing = stack.pop_all()
        except UnsavedError as error:
            self._failed(error)
            return
        same = known if unchanged else None
        self._writing = _Writing(partial(self._write, checkpoint, draft, writes, same, publishing))

    def remove_old(self) -> None:
        """Deletes what a run that was resumed does not keep any more, once one is restored."""
        if self._current is not None:
            with self._removing():
                self._remove_old(self._current.step)
            self._tell_not_removed()

    def wait(self) -> None:
        """Returns when no checkpoint is being written. If the last could not be, because of the disk, a note says so,
        and `failure` has the reason; any other error is raised."""
        if (writing := self._writing) is None:
            return
        writing.join()
        self._writing = None
        if isinstance(writing.error, UnsavedError):
            self._failed(writing.error)
        elif writing.error is not None:
            raise writing.error
        else:
            self.failure = None
            self._unsaved.written(WHAT)
            self._tell_not_removed()

    def check(self) -> None:
        """Looks whether a checkpoint could be written, as `wait` does; does not wait for it."""
        if self._writing is not None and not self._writing.is_alive():
            self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the checkpoint that is being written; Ctrl-C abandons it."""
        if error is None:
            self.wait()
            return
        if self._writing is not None and not isinstance(error, Exception):
            self._writing.cancelled.set()
        with suppress(UserError, CancelledError):  # the error that ends the run is the one to show
            self.wait()

    def _failed(self, error: UnsavedError) -> None:
        self.failure = error
        self._unsaved.add(WHAT, error, "the run continues, and the next checkpoint is tried")

    def _checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(step, self._directory / f"step-{step}")

    def _wait_for_previous(self) -> None:
        started = time.perf_counter()
        self.wait()
        if (waited := time.perf_counter() - started) > LONG_WAIT:
            self._note(f"waited {waited:.0f} s for the previous checkpoint; a larger checkpoint.every avoids this")

    def _known(self, step: int) -> Checkpoint | None:
        """The current checkpoint, if it is of this step and still complete."""
        current = self._current
        return current if current is not None and current.step == step and self._looks_whole(current) else None

    def _write(
        self,
        checkpoint: Checkpoint,
        draft: Path,
        writes: Sequence[DeferredWrite],
        same: Checkpoint | None,
        publishing: ExitStack,
        is_cancelled: IsCancelled,
    ) -> None:
        """Runs in the thread. `writes` write the large files; `same` is a checkpoint that has those that are not
        written."""
        with _one_line(checkpoint):
            with publishing:
                digests = {name: digest for write in writes for name, digest in write(is_cancelled).items()}
                if same is not None:  # after everything is written: to write to a link would change the other one
                    absent = {name: of for name, of in same.digests().items() if not (draft / name).exists()}
                    for name in absent:
                        _link(same.path / name, draft / name)
                    digests |= absent
                _write_manifest(draft, checkpoint.step, digests)
                if is_cancelled():
                    raise CancelledError
            sync(self._directory.parent)
        self._damaged.discard(checkpoint.path)
        self._current = checkpoint
        with self._removing():
            self._remove_old(checkpoint.step)

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """What cannot be removed, such as a file that NFS keeps while it is open, ends nothing: a note says so."""
        try:
            yield
        except OSError as error:
            self._not_removed = f"an old checkpoint cannot be removed: {reason_and_remedy(error)[0]}: {error.filename}"

    def _tell_not_removed(self) -> None:
        """Says it once of a file: each checkpoint tries it again."""
        if self._not_removed is not None and self._not_removed != self._told_not_removed:
            self._note(self._not_removed)
            self._told_not_removed = self._not_removed
        self._not_removed = None

    def _remove_old(self, step: int) -> None:
        """Deletes all but the last `keep` checkpoints; incomplete ones do not count and are deleted too."""
        earlier = [checkpoint for checkpoint in self.all() if checkpoint.step < step]
        whole = [checkpoint for checkpoint in earlier if self._looks_whole(checkpoint)]
        kept = whole[max(len(whole) - (self._keep - 1), 0) :]
        for checkpoint in earlier:
            if checkpoint not in kept:
                remove_directory(checkpoint.path)

    def _looks_whole(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.path not in self._damaged and checkpoint.damage(contents=False) is None


class _Writing(threading.Thread):
    """Writes one checkpoint. A daemon, so that a program that is told to end does not wait for it."""

    def __init__(self, write: Callable[[IsCancelled], None]) -> None:
        super().__init__(name="dapo-checkpoint", daemon=True)
        self._write = write
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write(self.cancelled.is_set)
        except BaseException as error:  # raised again by the run's own thread
            # A write that is cancelled may end with torch's error of a file that was cut off.
            self.error = CancelledError() if self.cancelled.is_set() else error


@contextmanager
def _one_line(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns an error of the disk into one line for the user."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_disk(error):
            raise
        raise UnsavedError.of(f"{checkpoint.path}: the checkpoint", *_why(error)) from error


def _load(parts: Sequence[Part], directory: Path) -> str | None:
    """Loads the parts; returns what is not finite, or None. A diverged run is not resumed from such a checkpoint."""
    try:
        for part in parts:
            part.load(directory)
    except NonFiniteError as error:
        return str(error)
    return None


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether a file could not be written; torch, safetensors and tokenizers each report this differently."""
    words = ("inline_container", "PytorchStreamWriter", "os error")
    if error is None or isinstance(error, RankLostError | ConnectionError):
        return False
    if isinstance(error, OSError | SafetensorError | UnsavedError) or any(word in str(error) for word in words):
        return True
    return isinstance(error, UserError) and _is_of_the_disk(error.__cause__)


def _why(error: Exception) -> tuple[str, str]:
    return (error.reason, error.remedy) if isinstance(error, UnsavedError) else reason_and_remedy(error)


def _write_manifest(directory: Path, step: int, digests: Digests | None = None) -> None:
    """`digests` are the hashes of files that were hashed while they were written; the others are read."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "files": {
            name: {"size": path.stat().st_size, "sha256": (digests or {}).get(name) or file_sha256(path)}
            for path in files
            for name in [path.relative_to(directory).as_posix()]
        },
    }
    manifest["sha256"] = _own_checksum(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _link(source: Path, target: Path) -> None:
    """A second name for the same file, or a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
