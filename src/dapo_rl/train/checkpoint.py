"""Checkpoints: written beside, fsynced, renamed, verified when they are read; the last `keep` stay.

`checkpoints/step-N/` holds `model/` (Hugging Face format), `optimizer.pt`, `state.json`, the settings (`config.yaml`)
and `manifest.json`, which has the size and the SHA-256 of every other file, and its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dapo_rl.base.files import directory_beside, remove_directory, remove_leftovers, sync
from dapo_rl.base.quote import one_line, shown
from dapo_rl.base.reading import read_bytes
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.models.lora import save_plain
from dapo_rl.runs.config_file import NAME as SETTINGS
from dapo_rl.runs.config_file import ConfigFile, settings_text
from dapo_rl.train.finite import not_finite

MANIFEST = "manifest.json"
MOST_BYTES = 16 << 20
"""Of a manifest: a line for each file."""
WEIGHTS = "weights.pt"
"""The weights once more, where the Hugging Face format does not have them name by name and bit by bit."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path

    def damage(self, *, contents: bool = True) -> str | None:
        """What is wrong with its files, if anything; without `contents` only their sizes are looked at."""
        try:
            manifest = json.loads(read_bytes(self.path / MANIFEST, MOST_BYTES))
            if manifest["sha256"] != _own_checksum(manifest):
                return f"{MANIFEST} is damaged"
            if manifest["step"] != self.step:
                return f"{MANIFEST} is of step {shown(manifest['step'])}"
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
        return self._numbers() if contents else None

    def _numbers(self) -> str | None:
        """A run that diverged is not gone on with. What cannot be read is not looked at: whoever loads it says why."""
        with suppress(Exception):
            if name := not_finite(self._weights()):
                return f"its weights are not finite, in {name}"
            if name := not_finite(self._optimizer()):
                return f"the state of its optimizer is not finite, in {name}"
        return None

    def settings(self) -> ConfigFile | None:
        """The settings of the run as it wrote this; none where they are damaged, or not there in an older one."""
        if self.damage(contents=False):
            return None
        try:
            file = ConfigFile.read(self.path / SETTINGS)
        except UserError:
            return None
        return file if file.is_whole else None

    def load(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Puts the weights into the model; returns the optimizer's state and everything else."""
        try:
            state = json.loads((self.path / "state.json").read_text())
            optimizer = self._optimizer()
            weights = self._weights()
        except Exception as error:
            raise UserError(f"{self.path}: cannot be read as a checkpoint: {one_line(error)}") from error
        own = model.state_dict()
        if difference := _difference(own, weights):
            raise UserError(f"{self.path}: is of another model: {difference}; resume with the model of the run")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        return optimizer, state

    def _optimizer(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
        return state

    def _weights(self) -> dict[str, Tensor]:
        if (self.path / WEIGHTS).exists():
            weights: dict[str, Tensor] = torch.load(self.path / WEIGHTS, map_location="cpu", weights_only=True)
            return weights
        return dict(_stored_weights(self.path / "model"))


class Checkpoints:
    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self._damaged: set[Path] = set()
        """Those whose contents were found to be damaged; that of others is not read again and again."""

    def all(self) -> list[Checkpoint]:
        """Everything that has the name of a checkpoint, oldest first.

        `step-N.old` is one whose place a new one was taking when the process ended.
        """
        if not self._directory.is_dir():
            return []
        entries = list(self._directory.iterdir())
        named = [(re.fullmatch(r"step-(\d+)(\.old)?", path.name), path) for path in entries if path.is_dir()]
        found = [(int(match[1]), match[2] is None, path) for match, path in named if match]
        return [Checkpoint(step, path) for step, _, path in sorted(found)]

    def latest(self) -> Checkpoint | None:
        """The newest of which nothing is missing."""
        return next((checkpoint for checkpoint in reversed(self.all()) if self._looks_whole(checkpoint)), None)

    def newest_sound(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest that is what was written, and what is wrong with those after it.

        None where there is no checkpoint; where all are damaged it is an error, and they stay as they are.
        """
        damaged: list[str] = []
        for checkpoint in reversed(self.all()):
            damage = checkpoint.damage()
            if damage is None:
                return checkpoint, damaged
            damaged.append(f"{checkpoint.path}: {damage}")
            self._damaged.add(checkpoint.path)
        if damaged:
            raise UserError(
                f"every checkpoint is damaged: {'; '.join(damaged)}; restore one from a copy, or start anew"
            )
        return None, []

    def settings(self) -> ConfigFile | None:
        """Those of the newest checkpoint that has them."""
        return next((file for checkpoint in reversed(self.all()) if (file := checkpoint.settings())), None)

    def save(
        self,
        step: int,
        model: Any,
        tokenizer: Any,
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
        config: Config | None = None,
    ) -> Checkpoint:
        final = self._directory / f"step-{step}"
        try:
            remove_leftovers(self._directory)
            with directory_beside(final, old=self._directory / f"step-{step}.old") as draft:
                save_plain(model, draft / "model")
                tokenizer.save_pretrained(draft / "model")
                weights = model.state_dict()
                if not _same_bits(weights, dict(_stored_weights(draft / "model"))):
                    torch.save(weights, draft / WEIGHTS)
                torch.save(dict(optimizer), draft / "optimizer.pt")
                (draft / "state.json").write_text(json.dumps({"step": step, **state}))
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
        """Leaves the last `keep`; one of which something is missing does not count, and goes."""
        earlier = [checkpoint for checkpoint in self.all() if checkpoint.step < step]
        whole = [checkpoint for checkpoint in earlier if self._looks_whole(checkpoint)]
        kept = whole[max(len(whole) - (self._keep - 1), 0) :]
        for checkpoint in earlier:
            if checkpoint not in kept:
                remove_directory(checkpoint.path)

    def _looks_whole(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.path not in self._damaged and checkpoint.damage(contents=False) is None


def _is_of_the_disk(error: Exception) -> bool:
    """Whether a file could not be written; of torch, safetensors and tokenizers each says so in a way of its own."""
    words = ("inline_container", "PytorchStreamWriter", "os error")
    return isinstance(error, OSError | SafetensorError) or any(word in str(error) for word in words)


def _write_manifest(directory: Path, step: int) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    manifest: dict[str, Any] = {
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


def _stored_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _difference(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str | None:
    """Why stored weights are not those of a model, if so. Of weights that are tied one name is enough."""
    covered = {own[name].data_ptr() for name in stored if name in own}
    for name, tensor in stored.items():
        if name not in own:
            return f"it has {name}"
        if tensor.shape != own[name].shape:
            return f"{name} has the shape {list(tensor.shape)} instead of {list(own[name].shape)}"
        if tensor.dtype != own[name].dtype:
            return f"{name} is {tensor.dtype} instead of {own[name].dtype}".replace("torch.", "")
    return next((f"it has no {name}" for name, tensor in own.items() if tensor.data_ptr() not in covered), None)


def _same_bits(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    if _difference(own, stored):
        return False
    return all(torch.equal(tensor, own[name].cpu()) for name, tensor in stored.items())
