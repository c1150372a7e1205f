"""What one rank of a policy and of a critic does. Every rank calls the same methods at the same time, with its own
samples."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dapo_rl.base.hashing import Digests
from dapo_rl.cluster.fsdp import RanksOutOfMemoryError, ShardedLogps, ShardedValues
from dapo_rl.cluster.network import open_tcp_store
from dapo_rl.cluster.ray_ranks import COLLECTIVE, Place
from dapo_rl.cluster.sharded_checkpoint import (
    frozen_checksum,
    local_part,
    own_digests,
    read_shards,
    shard_tensors,
    write_shards,
)
from dapo_rl.cluster.weights_broadcast import Address, ChannelBrokenError, WeightChannel, WeightLayout
from dapo_rl.cluster.weights_ipc import Bucket, lend, memory_of
from dapo_rl.cluster.weights_object_store import PackedWeight, pack_weight
from dapo_rl.config import TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.finite import not_finite
from dapo_rl.models.lora import PlainWeight, adapter_weights, save_adapter, without_adapters
from dapo_rl.models.response_logps import ResponsePass, TokenStats
from dapo_rl.models.save import save_model, why_no_copy
from dapo_rl.models.values import TokenValues
from dapo_rl.train.critic import HFCritic
from dapo_rl.train.learner import Learner, Stats
from dapo_rl.train.policy import HFPolicy
from dapo_rl.types import FloatArray, Trajectory

T = TypeVar("T")

Load = Callable[[], tuple[Any, dict[str, Any]]]
"""Loads the model, the same on every rank, and what the learner takes beside it."""


class LearnerWorker(Learner[Stats]):
    """One rank's part of a learner: a shard of the weights and moments.

    Needs a default process group that works on the host and on the device of the rank.
    """

    shards: ClassVar[str]
    """The directory of the shards within a checkpoint."""

    def __init__(self, load: Load, *, place: Place, train: TrainSettings, offload: bool = False, **how: Any) -> None:
        """The ranks of a host load the model one after the other, so that one at a time has all of it in memory.
        `offload` keeps the shards in host memory. The others are the arguments of the learner."""
        self._place, self._offload = place, offload
        self._busy_s, self._has_stepped = 0.0, False
        self._mesh = init_device_mesh(place.device.type, (place.world_size,))
        self._host_mesh = self._mesh if place.device.type == "cpu" else init_device_mesh("cpu", (place.world_size,))
        # Waits on the host alone: what ranks agree on does not synchronise the device.
        self._talk = dist.new_group(backend="gloo", timeout=COLLECTIVE)
        self._disk = dist.new_group(backend="gloo", timeout=COLLECTIVE)
        """Used by the thread that writes checkpoints, at the same time as the others."""
        self._to_write: dict[str, Any] = {}
        for turn in range(max(self._gather(place.of_host))):
            if turn == place.on_host:
                with _alive_meanwhile(place):  # a download may take long
                    model, more = load()
                super().__init__(model, train=train, **more, **how)
                del model, more
            place.alive()
            dist.barrier(self._talk)
        self._token_budget = min(self._gather(self._token_budget))
        if not all(self._gather(self._copies is not None)):
            self._copies = None

    def busy_seconds(self) -> float:
        """The seconds spent on scores and updates since the last call."""
        seconds, self._busy_s = self._busy_s, 0.0
        return seconds

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    def _results(self, *how: Any, **more: Any) -> list[FloatArray]:
        with self._timed():
            return super()._results(*how, **more)

    def _learn(self, *how: Any, **more: Any) -> Any:
        with self._timed():
            return super()._learn(*how, **more)

    def notes(self) -> tuple[str | None, str | None]:
        """Notes for the user on how the model is trained, and on how checkpoints are written."""
        return self.note, self._first(self.save_note)

    def copy_shards(self) -> None:
        """Copies this rank's shards of the weights and moments to host memory, for `write_shards`. If there is no
        memory for that, they must not change until they are written."""
        tensors = shard_tensors(self.model, self.optimizer, self._synced)
        local = {name: local_part(tensor) for name, tensor in tensors.items()}
        self._agree_finite(local, "the checkpoint's tensors")
        if self._copies is not None:
            copied = self._copies.take(local)
            tensors = {name: self._on_host(copied[name], tensor) for name, tensor in tensors.items()}
        self._to_write = {**tensors, "lowered_budget": self._lowered_budget, "frozen": self._frozen}

    def write_shards(self, directory: Path) -> Digests:
        """Writes what was copied last; returns when all ranks have, with the hashes of this rank's files. Computes
        nothing on the device, so that it can run beside an update."""
        state, self._to_write = self._to_write, {}
        write_shards(directory, self.shards, state, self._disk)
        return own_digests(directory, self.shards, self._place.rank)

    def load(self, directory: Path) -> None:
        """Loads what any number of ranks wrote. A NonFiniteError leaves the policy unchanged."""
        how = (self.model, self.optimizer, self._talk, self._synced)
        stored, own, extra = read_shards(directory, self.shards, *how)
        if extra.get("frozen") != self._frozen:
            other = "the weights that are not trained are others"
            raise UserError(f"{directory}: belongs to a different model: {other}; resume with the run's own model")
        self._agree_finite({name: local_part(value) for name, value in stored.items()}, "its tensors")
        with torch.no_grad():
            for name, tensor in stored.items():
                own[name].copy_(tensor)
        if (lowered := extra["lowered_budget"]) is not None:
            self._token_budget = self._lowered_budget = min(self._token_budget, lowered)

    @cached_property
    def _frozen(self) -> int | None:
        """A checksum of the weights that are not trained, which checkpoints do not hold; None if all are."""
        sums = self._gather(frozen_checksum(self.model))
        return None if sums[0] is None else sum(of_rank or 0 for of_rank in sums)

    def _pass_of(self, model: Any, **how: Any) -> ResponsePass[Stats]:
        sharding = {"mesh": self._mesh, "device": self._place.device, "offload": self._offload}
        return super()._pass_of(model, anyone=lambda here: any(self._gather(here)), **sharding, **how)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        return sums

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _step(self) -> None:
        first, self._has_stepped = not self._has_stepped, True
        with _alive_meanwhile(self._place) if first else nullcontext():  # the 8-bit optimizer compiles its step
            super()._step()

    def _is_here(self, error: torch.OutOfMemoryError) -> bool:
        """A backward pass that does not fit stops the run: the other ranks wait in collectives that it has not
        begun."""
        if isinstance(error, RanksOutOfMemoryError):
            return error.here
        raise UserError(self._too_large()) from None

    def _too_large(self, samples: Sequence[Trajectory] = ()) -> str:
        return (
            f"out of memory on rank {self._place.rank} with micro-batches of {self._token_budget} tokens; lower "
            "train.token_budget or sampling.max_new_tokens, or set train.gradient_checkpointing=true"
        )

    def _gather(self, value: T) -> list[T]:
        """The value of each rank."""
        self._place.alive()
        values: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(values, value, self._talk)
        return values

    def _gathered(self, weight: PlainWeight) -> Tensor | None:
        """The whole weight on the host of the first rank, with its adapter merged in."""
        full = weight.merged(_whole)
        return full.cpu().clone() if self._place.rank == 0 else None

    def _on_host(self, copied: Tensor, tensor: Tensor) -> Tensor:
        """A copied shard as a part of the whole tensor."""
        if not isinstance(tensor, DTensor):
            return copied
        whole: dict[str, Any] = {"shape": tensor.size(), "stride": tensor.stride(), "run_check": False}
        return DTensor.from_local(copied, self._host_mesh, tensor.placements, **whole)

    def _why_no_copy(self) -> str | None:
        """The ranks of a host share its memory."""
        held = sum(local_part(parameter).nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        moments = held // 2 if self._train.optimizer == "adamw_8bit" else 2 * held
        copied = self.copies * (held * (1 if self._synced is None else 2) + moments) * self._place.of_host
        return why_no_copy(copied, 0 if self._place.device.type == "cuda" and not self._offload else copied)

    def _first(self, value: T | None) -> T | None:
        """The first rank's value that is not None."""
        return next((of_rank for of_rank in self._gather(value) if of_rank is not None), None)

    def _agree_finite(self, tensors: Any, what: str) -> None:
        """Raises on all ranks if a tensor of one is not finite."""
        if name := self._first(not_finite(tensors)):
            raise NonFiniteError(f"{what} are not finite, in {name}")


class PolicyWorker(LearnerWorker[TokenStats], HFPolicy):
    """One rank's part of a policy, and of a critic if there is one."""

    forward, shards = ShardedLogps, "shards"
    critic: CriticWorker | None = None
    _lent: Bucket = ()
    _channel: WeightChannel | None = None
    """The group with the engines, on the first rank."""
    _channel_store: Any = None
    """What engines read at the moment."""
    plan = MemoryPlan()

    def planned(self) -> MemoryPlan:
        """What it keeps in GPU memory."""
        return self.plan

    def work_done(self) -> tuple[float, int]:
        """The seconds spent on scores and updates since the last call, and the peak memory so far, in bytes: of its
        GPU, or of the process."""
        seconds = self.busy_seconds() + (0.0 if self.critic is None else self.critic.busy_seconds())
        if self._place.device.type == "cuda":
            return seconds, torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def stored_buffers(self) -> dict[str, Tensor]:
        """The buffers that are stored in the model's files, such as the biases of a router."""
        own = dict(self.model.named_buffers())
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items() if name in own}

    def weight_layouts(self) -> list[WeightLayout]:
        plain = self._plain_weights().items()
        return [WeightLayout(name, tuple(weight.base.shape), weight.base.dtype) for name, weight in plain]

    def full_weights(self, names: Sequence[str]) -> list[Tensor] | None:
        """These weights on the host; None on all ranks but the first."""
        own = self._plain_weights()
        full = [self._gathered(own[name]) for name in names]
        return [weight for weight in full if weight is not None] if self._place.rank == 0 else None

    def packed_weights(self, names: Sequence[str], dtype: torch.dtype | None) -> list[PackedWeight] | None:
        """These weights as Ray's object store has them; None on all ranks but the first."""
        full = self.full_weights(names)
        return None if full is None else [pack_weight(*named, dtype) for named in zip(names, full, strict=True)]

    def memory(self) -> str:
        """Where it can lend its weights."""
        return memory_of(self._place.device.type)

    def lend_weights(self, names: Sequence[str], dtype: torch.dtype | None, borrowers: int) -> list[bytes]:
        """Handles of these weights, one for each borrower, valid until the next call."""
        own, device = self._plain_weights(), self._place.device
        lent: list[tuple[str, Tensor]] = []
        for name in names:
            whole = own[name].merged(_whole)
            if borrowers:
                kind = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
                lent.append((name, torch.empty(whole.shape, dtype=kind, device=device).copy_(whole)))
        self._lent = lent
        return lend(lent, borrowers)

    def end_lending(self) -> None:
        self._lent = ()

    def channel_address(self) -> Address | None:
        return self._channel.address if self._channel else None

    def open_channel(self) -> Address | None:
        """Where engines join a group with the first rank; None on the others."""
        self.close_channel()
        if self._place.rank > 0:
            return None
        self._channel_store, self._opened = open_tcp_store()
        return self._opened

    def join_channel(self, size: int, timeout_s: float) -> bool:
        """Waits for the engines to join the group; whether they did."""
        if self._place.rank == 0:
            how = (0, size, self._place.device.type, timeout_s, self._channel_store)
            with suppress(ChannelBrokenError):
                self._channel = WeightChannel(self._opened, *how)
        return self._place.rank > 0 or self._channel is not None

    def send_weights(self, bucket: Sequence[WeightLayout]) -> bool:
        """Sends these weights to the group; whether it still is one."""
        own = self._plain_weights()
        whole = [(layout, own[layout.name].merged(_whole)) for layout in bucket]
        if self._place.rank == 0:
            if self._channel is None:
                return False
            try:
                self._channel.send(whole, self._place.alive)
            except ChannelBrokenError:
                self.close_channel()
                return False
        return True

    def close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._channel_store = None

    def weights_not_finite(self) -> str | None:
        """The name of the first weight that is not finite on some rank, or None."""
        return self._first(not_finite({name: local_part(p) for name, p in self.model.named_parameters()}))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves what one process saves, from the first rank."""
        lora = self._settings.lora
        if lora is not None and lora.save == "adapter":
            adapters = {name: _whole(weight) for name, weight in adapter_weights(self.model).items()}
            if self._place.rank == 0:
                save_adapter(self.model, self._tokenizer, lora, self._settings.name, path, adapters)
        else:
            weights = self._plain_state()
            if self._place.rank == 0:
                save_model(self.model, self._tokenizer, path, self._save_dtype, weights)
        dist.barrier(self._talk)

    def _plain_weights(self) -> dict[str, PlainWeight]:
        """The weights by their names in the model as loaded."""
        return {weight.name: weight for weight in without_adapters(self.model, self.model.named_parameters())}

    def _plain_state(self) -> dict[str, Tensor]:
        """The state dict without adapters on the host of the first rank."""
        gathered: dict[int, Tensor | None] = {}
        weights: dict[str, Tensor] = {}
        parameters = without_adapters(self.model, self.model.named_parameters(remove_duplicate=False))
        owners = {weight.name: weight.base for weight in parameters}
        for weight in without_adapters(self.model, self.model.state_dict().items()):
            key = id(owners.get(weight.name, weight.base))  # tied weights stay tied
            if key not in gathered:
                self._place.alive()
                gathered[key] = self._gathered(weight)
            if (full := gathered[key]) is not None:
                weights[weight.name] = full
        return weights


class CriticWorker(LearnerWorker[TokenValues], HFCritic):
    """One rank's part of a critic."""

    forward, shards = ShardedValues, "critic"


@contextmanager
def _alive_meanwhile(place: Place) -> Iterator[None]:
    """Says every second that the rank makes progress."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(1.0):
            place.alive()

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
