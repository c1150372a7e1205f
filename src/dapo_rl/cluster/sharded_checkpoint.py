"""Checkpoints by torch.distributed.checkpoint: every rank writes its shards, and any number of ranks reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
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

from dapo_rl.base.hashing import Digests, file_sha256
from dapo_rl.base.os_errors import reason_and_remedy
from dapo_rl.base.quote import one_line
from dapo_rl.errors import UnsavedError, UserError
from dapo_rl.train.optimizer import is_8bit, moments_of

METADATA = ".metadata"


def shard_tensors(model: Any, optimizer: torch.optim.Optimizer, reference: Any = None) -> dict[str, Tensor]:
    """The trained weights and their moments, which the first step would create, and the weights of a reference policy
    that changes. The parts of moments in 8 bits are quantised by the shards of this rank, and are its own."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        tensors[f"weights.{name}"] = weight.detach()
        for key, moment in moments_of(optimizer, weight).items():
            if moment.dim() and is_8bit(optimizer):
                tensors |= _own_parts(f"moments.{name}.{key}", local_part(moment))
            else:
                tensors[f"moments.{name}.{key}"] = moment
    if reference is not None:
        tensors |= {f"reference.{name}": weight.detach() for name, weight in reference.named_parameters()}
    return tensors


def _own_parts(name: str, shard: Tensor) -> dict[str, Tensor]:
    """The tensors that a shard consists of, under names that no other rank has."""
    name = f"{name}.{_own_mark()}"
    if not hasattr(shard, "__tensor_flatten__"):  # too small, or not a whole number of blocks
        return {name: shard}
    parts, _ = shard.__tensor_flatten__()
    return {f"{name}.{part}": getattr(shard, part) for part in parts}


def _own_mark() -> str:
    return f"rank{dist.get_rank()}of{dist.get_world_size()}"


def local_part(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def frozen_checksum(model: Any) -> int | None:
    """A checksum of the bits of this rank's shards of the weights that are not trained; None if there are none. Those
    of all ranks add up to that of the whole, however it is sharded."""
    local = [local_part(weight.detach()) for weight in model.parameters() if not weight.requires_grad]
    return sum(int(part.view(torch.int32).sum(dtype=torch.int64)) for part in local) if local else None


def write_shards(directory: Path, folder: str, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Writes tensors, of which every rank has shards, and other values, which are the same on all ranks, to a folder of
    a checkpoint."""
    try:
        save(dict(state), checkpoint_id=directory / folder, process_group=group)
    except CheckpointException as error:
        raise UnsavedError.of(f"{directory}: the checkpoint", *reason_and_remedy(_first(error))) from error


def own_digests(directory: Path, folder: str, rank: int) -> Digests:
    files = [*(directory / folder).glob(f"__{rank}_*"), *([directory / folder / METADATA] if rank == 0 else [])]
    return {file.relative_to(directory).as_posix(): file_sha256(file) for file in files}


def read_shards(
    directory: Path,
    folder: str,
    model: Any,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    reference: Any = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Reads this rank's part of a checkpoint: its tensors by name, the tensors of the model and optimizer to copy them
    to, and the other values. It changes nothing yet."""
    own = shard_tensors(model, optimizer, reference)
    reader = FileSystemReader(directory / folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(error)}") from error
    stored = {name: list(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
    marks = {mark[0] for name in stored if (mark := re.search(r"(?<=\.)rank\d+of\d+", name))}
    if marks and _own_mark() not in marks:
        raise UserError(
            f"{directory}: its moments are quantised by the shards of {len(marks)} ranks (train.optimizer=adamw_8bit); "
            f"resume with cluster.ranks={len(marks)}"
        )
    of_others = marks - {_own_mark()}
    extra = [name for name in entries if name not in stored]
    stored = {name: size for name, size in stored.items() if of_others.isdisjoint(name.split("."))}
    if other := _difference(own, stored):
        raise UserError(f"{directory}: belongs to a different model: {other}; resume with the run's own model")
    state: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in own.items()}
    state |= dict.fromkeys(extra)
    try:
        load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise UserError(f"{directory}: cannot be read as a checkpoint: {one_line(_first(error))}") from error
    return {name: state[name] for name in own}, own, {name: state[name] for name in extra}


def _first(error: CheckpointException) -> Exception:
    """What went wrong on the first rank that failed. All ranks raise the same error."""
    reason, _ = error.failures[min(error.failures)]
    return reason if isinstance(reason, Exception) else RuntimeError(str(reason))


def _difference(own: Mapping[str, Tensor], stored: Mapping[str, list[int]]) -> str | None:
    for name, shape in stored.items():
        if name not in own:
            return f"it has {name}"
        if shape != list(own[name].shape):
            return f"{name} has the shape {shape} instead of {list(own[name].shape)}"
    return next((f"it has no {name}" for name in own if name not in stored), None)
