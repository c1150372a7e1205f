"""Checkpoints: written beside, fsynced, renamed; the last `keep` stay.

`checkpoints/step-N/` holds `model/` (Hugging Face format), `optimizer.pt` and `state.json`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo_rl.errors import UserError
from dapo_rl.runs.files import sync


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path

    def load(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Puts the weights into the model; returns the optimizer's state and everything else."""
        try:
            stored = type(model).from_pretrained(self.path / "model", dtype=next(model.parameters()).dtype)
            optimizer = torch.load(self.path / "optimizer.pt", map_location="cpu", weights_only=True)
            state = json.loads((self.path / "state.json").read_text())
        except Exception as error:
            raise UserError(f"{self.path}: cannot be read as a checkpoint: {error}") from error
        model.load_state_dict(stored.state_dict())
        return optimizer, state


class Checkpoints:
    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        named = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in self._directory.iterdir()]
        return sorted((Checkpoint(int(match[1]), path) for match, path in named if match), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    def save(
        self, step: int, model: Any, tokenizer: Any, optimizer: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Checkpoint:
        final, beside = self._directory / f"step-{step}", self._directory / f".step-{step}.part"
        try:
            for left_by_a_crash in self._directory.glob(".step-*.part"):
                shutil.rmtree(left_by_a_crash)
            beside.mkdir(parents=True)
            model.save_pretrained(beside / "model")
            tokenizer.save_pretrained(beside / "model")
            torch.save(dict(optimizer), beside / "optimizer.pt")
            (beside / "state.json").write_text(json.dumps({"step": step, **state}))
            for path in [*beside.rglob("*"), beside]:
                sync(path)
            if final.exists():
                shutil.rmtree(final)
            beside.rename(final)
            sync(self._directory)
        except Exception as error:  # on a full disk torch and safetensors raise classes of their own
            shutil.rmtree(beside, ignore_errors=True)
            raise UserError(
                f"{final}: the checkpoint cannot be written: {error}; earlier ones are untouched"
            ) from error
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old.path)
        return Checkpoint(step, final)
