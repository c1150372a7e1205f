"""What one rank of a policy does. Every rank calls the same methods at the same time, with its own samples."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dapo_rl.base.hashing import Rest
from dapo_rl.cluster.sharding import RanksOutOfMemoryError, ShardedLogps
from dapo_rl.cluster.shards import read_shards, write_shards
from dapo_rl.config import AlgoSettings, ModelSettings, TrainSettings
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.load import save_weights
from dapo_rl.models.responses import ResponseLogps
from dapo_rl.train.finite import not_finite
from dapo_rl.train.policy import HFPolicy, _Counts, budget_note
from dapo_rl.types import TrainSample

T = TypeVar("T")

NOBODY = TrainSample(np.zeros(1, np.int32), np.zeros(1, np.int32), 0.0, 0.0, group=-1, in_loss=False, mask=False)  # type: ignore[arg-type]
"""What a rank computes when it has no sample left and others have: it takes part in their collectives."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among the others."""

    rank: int
    world_size: int
    device: torch.device
    alive: Callable[[], None] = lambda: None
    """Called while the rank makes progress."""


class RankPolicy(HFPolicy):
    """One rank's part of a policy: a shard of the weights and moments.

    Needs a default process group that works on the host and on the device of the rank.
    """

    def __init__(
        self,
        model: Any,
        *,
        place: Place,
        train: TrainSettings,
        algo: AlgoSettings,
        offload: bool = False,
        settings: ModelSettings | None = None,
        **how: Any,
    ) -> None:
        """`model` is the whole model, the same on every rank; `offload` keeps the shards in host memory. The others are
        the arguments of `HFPolicy`."""
        if settings is not None and settings.lora is not None:
            raise UserError("model.lora: adapters cannot be trained on several ranks; leave it out")
        if train.optimizer != "adamw":
            raise UserError(f"train.optimizer: {train.optimizer} cannot be trained on several ranks; use adamw")
        self._place, self._offload = place, offload
        self._mesh = init_device_mesh(place.device.type, (place.world_size,))
        # Waits on the host alone: what ranks agree on does not synchronise the device.
        self._talk = dist.new_group(backend="gloo")
        train = train.model_copy(update={"fused": False})
        super().__init__(model, train=train, algo=algo, settings=settings, **how)
        self._token_budget = min(self._gather(self._token_budget))

    def weight_sizes(self) -> list[tuple[str, int]]:
        """The names of the weights and their sizes in bytes."""
        return [(name, weight.numel() * weight.element_size()) for name, weight in self.model.named_parameters()]

    def full_weights(self, names: Sequence[str]) -> list[Tensor] | None:
        """These weights on the host; None on all ranks but the first."""
        own = dict(self.model.named_parameters())
        full = [self._gathered(own[name]) for name in names]
        return [weight for weight in full if weight is not None] if self._place.rank == 0 else None

    def write_shards(self, directory: Path) -> None:
        """Writes this rank's shards of the weights and moments; returns when all ranks have."""
        self._place.alive()
        extra = {"lowered_budget": self._lowered_budget}
        local = {name: _local(p) for name, p in self.model.named_parameters()}
        moments = [{key: _local(m) for key, m in state.items()} for state in self._optimizer.state.values()]
        self._agree_finite(local, "the weights")
        self._agree_finite(moments, "the state of the optimizer")
        write_shards(directory, self.model, self._optimizer, extra, self._talk)

    def save(self, directory: Path) -> Rest:
        self.write_shards(directory)
        return lambda is_cancelled: {}

    def load(self, directory: Path) -> None:
        """Loads what any number of ranks wrote. A NonFiniteError leaves the policy unchanged."""
        self._place.alive()
        loaded = read_shards(directory, self.model, self._optimizer, self._talk)
        self._agree_finite({name: _local(value) for name, value in loaded.tensors.items()}, "its tensors")
        loaded.restore()
        if (lowered := loaded.extra["lowered_budget"]) is not None:
            self._token_budget = self._lowered_budget = min(self._token_budget, lowered)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves the model and tokenizer in Hugging Face format, from the first rank."""
        gathered: dict[int, Tensor | None] = {}
        weights: dict[str, Tensor] = {}
        owners = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.model.state_dict().items():
            key = id(owners.get(name, value))  # tied weights stay tied
            if key not in gathered:
                self._place.alive()
                gathered[key] = self._gathered(value)
            if (full := gathered[key]) is not None:
                weights[name] = full
        if self._place.rank == 0:
            save_weights(self.model, weights, self._tokenizer, path, self._save_dtype)
        dist.barrier(self._talk)

    def _logps_of(self, model: Any, **how: Any) -> ResponseLogps:
        place = self._place
        more: dict[str, Any] = {"offload": self._offload, "anyone": lambda here: any(self._gather(here))}
        return ShardedLogps(model, mesh=self._mesh, device=place.device, **more, **how)

    def _count(self, samples: Sequence[TrainSample]) -> _Counts:
        ranks = self._gather(super()._count(samples))
        group_tokens: Counter[int] = Counter()
        for counts in ranks:
            group_tokens.update(counts.group_tokens)
        return _Counts(sum(c.tokens for c in ranks), sum(c.samples for c in ranks), group_tokens)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        return sums

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._train.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _in_micro_batches(
        self, samples: Sequence[TrainSample], compute: Callable[[Sequence[TrainSample], int], T]
    ) -> list[tuple[list[int], T]]:
        """As many micro-batches on each rank as on the rank with the most. `compute` is told their number on all.

        If a forward pass does not fit into memory, everything is recomputed with smaller micro-batches on all ranks. A
        backward pass that does not fit stops the run: the other ranks wait in collectives that it has not begun.
        """
        while True:
            own = self._micro_batches(samples)
            numbers = self._gather(len(own))
            done: list[tuple[list[int], T]] = []
            for k in range(max(numbers)):
                self._place.alive()
                indices = own[k] if k < len(own) else []
                try:
                    done.append((indices, compute([samples[i] for i in indices] or [NOBODY], sum(numbers))))
                except RanksOutOfMemoryError as error:
                    here = error.here
                    break
                except torch.OutOfMemoryError:
                    raise UserError(self._too_large()) from None
            else:
                return done
            done.clear()
            self._optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            alone = here and (len(indices) <= 1 or self._token_budget == 1)
            if problem := next((p for p in self._gather(self._too_large() if alone else None) if p), None):
                raise UserError(problem)
            self._lower_budget(samples, sum(numbers))

    def _lower_budget(self, samples: Sequence[TrainSample], count: int) -> None:
        """Halves the budget until the samples of all ranks need more than `count` micro-batches."""
        before = self._token_budget
        while sum(self._gather(len(self._micro_batches(samples)))) <= count and self._token_budget > 1:
            self._token_budget //= 2
        self._lowered_budget = self._token_budget
        self._notes.append(budget_note(before, self._token_budget))

    def _too_large(self) -> str:
        return (
            f"out of memory on rank {self._place.rank} with micro-batches of {self._token_budget} tokens; lower "
            "train.token_budget or sampling.max_new_tokens, or set train.gradient_checkpointing=true"
        )

    def _gather(self, value: T) -> list[T]:
        """The value of each rank."""
        values: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(values, value, self._talk)
        return values

    def _gathered(self, weight: Tensor) -> Tensor | None:
        """The whole weight on the host of the first rank."""
        full = weight.detach()
        if isinstance(full, DTensor):
            full = full.full_tensor()
        return full.cpu().clone() if self._place.rank == 0 else None

    def _agree_finite(self, tensors: Any, what: str) -> None:
        """Raises on all ranks if a tensor of one is not finite."""
        if name := next((name for name in self._gather(not_finite(tensors)) if name), None):
            raise NonFiniteError(f"{what} are not finite, in {name}")


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
