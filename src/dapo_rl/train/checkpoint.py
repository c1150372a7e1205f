"""Checkpoints are written to a temporary directory, fsynced, renamed, and verified when read; the last `keep` stay.

`checkpoints/step-N/` contains the files of each part of the run, the settings (`config.yaml`), and `manifest.json`
with the size and SHA-256 of every other file, and a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from dapo_rl.base.files import directory_beside, remove_directory, remove_leftovers, sync
from dapo_rl.base.quote import shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.runs.config_file import NAME as SETTINGS
from dapo_rl.runs.config_file import ConfigFile, settings_text

MANIFEST = "manifest.json"
FORMAT = 2
"""The version of the layout, stored in the manifest; a checkpoint in another layout is rejected."""
MOST_BYTES = 16 << 20
"""Size limit of a manifest."""


class Part(Protocol):
    """A part of a run's state. It writes and reads its own files in a checkpoint's directory."""

    def save(self, directory: Path) -> None: ...

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
            manifest = json.loads(read_bytes(self.path / MANIFEST, MOST_BYTES))
            if manifest["sha256"] != _own_checksum(manifest):
                return f"{MANIFEST} is damaged"
            if manifest["step"] != self.step:
                return f"{MANIFEST} belongs to step {shown(manifest['step'])}"
            for name, expected in manifest["files"].items():
                file = self.path / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != expected["size"]:
                    return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
                if contents and _checksum(file) != expected["sha256"]:
                    return f"the checksum of {name} is wrong"
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{MANIFEST} is damaged"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return None

    def check_format(self) -> None:
        """Raises if the checkpoint is intact but has another layout. The run does not fall back to an older one."""
        try:
            manifest = json.loads(read_bytes(self.path / MANIFEST, MOST_BYTES))
            whole, written = manifest["sha256"] == _own_checksum(manifest), manifest.get("format")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # `damage` reports this
        if whole and written != FORMAT:
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
    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._damaged: set[Path] = set()
        """Checkpoints whose contents were found to be damaged. Contents are read only once, by `restore`."""

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
        """The newest checkpoint that looks complete."""
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
        final = self._directory / f"step-{step}"
        try:
            remove_leftovers(self._directory)
            with directory_beside(final, old=self._directory / f"step-{step}.old") as draft:
                for part in parts:
                    part.save(draft)
                if config is not None:
                    (draft / SETTINGS).write_bytes(settings_text(config))
                _write_manifest(draft, step)
            sync(self._directory.parent)
        except Exception as error:
            if not _is_of_the_disk(error):
                raise
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise UserError(
                f"{final}: the checkpoint cannot be written: {reason}; earlier ones are untouched"
            ) from error
        self._damaged.discard(final)
        self._remove_old(step)
        return Checkpoint(step, final)

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


def _load(parts: Sequence[Part], directory: Path) -> str | None:
    """Loads the parts; returns what is not finite, or None. A diverged run is not resumed from such a checkpoint."""
    try:
        for part in parts:
            part.load(directory)
    except NonFiniteError as error:
        return str(error)
    return None


def _is_of_the_disk(error: Exception) -> bool:
    """Whether a file could not be written; torch, safetensors and tokenizers each report this differently."""
    words = ("inline_container", "PytorchStreamWriter", "os error")
    return isinstance(error, OSError | SafetensorError) or any(word in str(error) for word in words)


def _write_manifest(directory: Path, step: int) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "files": {
            path.relative_to(directory).as_posix(): {"size": path.stat().st_size, "sha256": _checksum(path)}
            for path in files
        },
    }
    manifest["sha256"] = _own_checksum(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _own_checksum(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
