"""Whether the checkpoints of a run fit on its disk, before the first step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo_rl.base.format import counted, gib
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.memory.sizes import moment_bytes


@dataclass(frozen=True, slots=True)
class DiskNeed:
    checkpoint: int
    """Bytes of one checkpoint: weights, the optimizer's state, and the model in the type that is saved."""
    model: int
    """Bytes of the model that is saved at the end."""

    @classmethod
    def of(cls, config: Config, model: Any, save_dtype: torch.dtype) -> DiskNeed:
        ranks, lora = config.cluster.backend is not None, config.model.lora is not None
        parameters = sum(p.numel() for p in model.parameters())
        # Adapters on ranks, which are not part of `model`, are too small to matter.
        trained = 0 if ranks and lora else sum(p.numel() for p in model.parameters() if p.requires_grad)
        moments = moment_bytes(config)
        saved = save_dtype.itemsize * (parameters - trained * lora)
        # In one process, a checkpoint has a model to load, and the weights again if that does not store them exactly.
        exact = 0 if save_dtype == torch.float32 and not lora else 4 * parameters
        policy = 4 * trained if ranks else saved + exact
        critic = (4 + moments) * parameters * config.has_critic
        reference = 4 * parameters * (config.algo.ref_sync_steps is not None)
        return cls(policy + moments * trained + critic + reference, saved)

    def check(self, config: Config, run_dir: Path, step: int) -> None:
        """Raises if not everything fits that a run at this step is going to write: the checkpoints that it keeps, the
        one that it writes before it removes the oldest, and the model."""
        steps, every, last = config.train.steps, config.checkpoint_every, config.checkpoint.save_final
        writes = (steps - 1) // every - step // every + last if step < steps else 0
        disk = shutil.disk_usage(_existing(run_dir))
        if writes < 1 or disk.total == 0:  # some network file systems do not tell
            return
        there = [path for path in run_dir.glob("checkpoints/step-*") if path.is_dir()]
        taken = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in there]
        room, model = disk.free + sum(taken), self.model if last else 0
        most = min(config.checkpoint.keep + 1, len(there) + writes)
        if disk.free >= self.checkpoint and room >= most * self.checkpoint + model:
            return
        remedies = ["free some space"]
        fewer = min(2, most) * self.checkpoint + model
        if config.checkpoint.keep > 1 and room >= fewer and (most > 2 or len(there) > 1):
            remedies.append(f"set checkpoint.keep=1, which needs {gib(fewer)}")
        elif not there and writes > 1 and last and room >= (one := self.checkpoint + model):
            remedies.append(f"set checkpoint.every={steps}, which saves the last step alone and needs {gib(one)}")
        if not there:
            remedies.append("choose another directory with --run")
        found = f"{gib(room)} with the {counted(len(there), 'checkpoint')} there" if there else f"{gib(room)} free"
        raise UserError(
            f"{run_dir}: the run needs {gib(most * self.checkpoint + model)} of disk space for "
            f"{counted(most, 'checkpoint')} of {gib(self.checkpoint)}{' and the model' if last else ''}, and its disk "
            f"has {found}; {', or '.join(remedies)}"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
