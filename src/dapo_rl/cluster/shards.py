"""Checkpoints by torch.distributed.checkpoint: every rank writes its shards, and any number of ranks reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from dapo_rl.base.hashing import Digests
from dapo_rl.base.quote import one_line
from dapo_rl.errors import UserError

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class LoadedShards:
    """What a checkpoint has for this rank, not yet in the model."""

    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    own: Mapping[str, Tensor]
    """The tensors of the model and of the optimizer under the same names."""

    @torch.no_grad()
    def restore(self) -> None:
        for name, tensor in self.tensors.items():
            self.own[name].copy_(tensor)


def shard_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The trained weights and their moments, which the first step would create."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        tensors[f"weights.{name}"] = weight.detach()
        moments = optimizer.state[weight]
        if not moments:
            moments["step"] = torch.zeros((), device=weight.device)
            moments["exp_avg"] = torch.zeros_like(weight.detach())
            moments["exp_avg_sq"] = torch.zeros_like(weight.detach())
        tensors |= {f"moments.{name}.{key}": moment for key, moment in moments.items()}
    return tensors


def frozen_checksum(model: Any) -> int | None:
    """A checksum of the bits of this rank's shards of the weights that are not trained; None if there are none. Those
    of all ranks add up to that of the whole, however it is sharded."""
    frozen = [weight.detach() for weight in model.parameters() if not weight.requires_grad]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in frozen]
    return sum(int(part.view(torch.int32).sum(dtype=torch.int64)) for part in local) if local else None


def write_shards(directory: Path, folder: str, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Writes tensors, of which every rank has shards, and other values, which are the same on all ranks, to a folder of
    a checkpoint."""
    try:
        save(dict(state), checkpoint_id=directory / folder, process_group=group)
    except CheckpointException as error:
        raise UserError(
            f"{directory}: the checkpoint cannot be written: {_first(error)}; earlier ones are untouched"
        ) from error


def own_digests(directory: Path, folder: str, rank: int) -> Digests:
    """The hashes of the files that a rank has written; the first has also written the metadata."""
    files = [*(directory / folder).glob(f"__{rank}_*"), *([directory / folder / METADATA] if rank == 0 else [])]
    return {file.relative_to(directory).as_posix(): _sha256(file) for file in files}


def read_shards(
    directory: Path, folder: str, model: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> LoadedShards:
    """Reads what `write_shards` wrote, into new memory."""
    own = shard_tensors(model, optimizer)
    reader = FileSystemReader(directory / folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(error)}") from error
    stored = {name: list(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
    if other := _difference(own, stored):
        raise UserError(f"{directory}: belongs to a different model: {other}; resume with the run's own model")
    state: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in own.items()}
    extra = [name for name in entries if name not in stored]
    state |= dict.fromkeys(extra)
    try:
        load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {_first(error)}") from error
    return LoadedShards({name: state[name] for name in own}, {name: state[name] for name in extra}, own)


def _first(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed. All ranks raise the same error."""
    reason, _ = error.failures[min(error.failures)]
    return one_line(reason)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(own: Mapping[str, Tensor], stored: Mapping[str, list[int]]) -> str | None:
    """How stored tensors differ from those of the model, or None."""
    for name, shape in stored.items():
        if name not in own:
            return f"it has {name}"
        if shape != list(own[name].shape):
            return f"{name} has the shape {shape} instead of {list(own[name].shape)}"
    return next((f"it has no {name}" for name in own if name not in stored), None)
