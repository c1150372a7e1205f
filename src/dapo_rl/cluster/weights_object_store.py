"""The weights of one version in Ray's object store: written once, and read by every engine.

On a host, the store is shared memory that all its engines read without a copy; Ray sends a bucket to another host once,
however many engines are there. The store keeps the latest version, so that an engine that is started again gets it
without asking the trainer, which may be in the middle of an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.base.quote import one_line
from dapo_rl.cluster.distributed_policy import DistributedWeights
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.models.weights import WeightSource

STORED_BYTES = 256 << 20
"""Size of a bucket in the store."""
SMALL_BYTES = 100 << 10
"""Ray keeps smaller results of actors in the process that asked for them."""

PackedWeight = tuple[str, npt.NDArray[Any], torch.dtype | None]
"""The name of a weight, its array, and the type as which to read it."""


class WeightsLostError(Exception):
    """Stored weights were lost with the host that had them."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A WeightSource in whichever process it is read."""

    version: int
    refs: tuple[Any, ...]

    @classmethod
    def put(cls, version: int, source: WeightSource, dtype: torch.dtype | None = None) -> StoredWeights:
        """Stores the weights, in `dtype` if the engines round them to it anyway. Those on ranks do not pass through
        this process."""
        if isinstance(source, DistributedWeights):
            return cls(version, tuple(source.stored(STORED_BYTES, dtype)))
        ray = import_ray()
        buckets = source.buckets(STORED_BYTES)
        return cls(version, tuple(ray.put([pack_weight(*named, dtype) for named in bucket]) for bucket in buckets))

    @property
    def lost(self) -> bool:
        """Whether some of them were lost with the host that had them, as far as Ray knows."""
        there = import_ray().experimental.get_object_locations(list(self.refs)).values()
        return any(not where["node_ids"] and where["object_size"] > SMALL_BYTES for where in there)

    def fetch(self) -> None:
        """Brings them to this host."""
        import_ray().wait(list(self.refs), num_returns=len(self.refs), fetch_local=True)

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets as they were stored. Their tensors are in shared memory, and must not be changed."""
        ray = import_ray()
        for ref in self.refs:
            try:
                packed = ray.get(ref)
            except ray.exceptions.ObjectLostError as error:
                raise WeightsLostError(one_line(error)) from error
            yield [_unpacked(*entry) for entry in packed]


def pack_weight(name: str, tensor: Tensor, dtype: torch.dtype | None) -> PackedWeight:
    """An array, which Ray reads without a copy; NumPy has no bfloat16."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return name, tensor.view(torch.int16).numpy(), torch.bfloat16
    return name, tensor.numpy(), None


def _unpacked(name: str, array: npt.NDArray[Any], view: torch.dtype | None) -> tuple[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return name, tensor if view is None else tensor.view(view)
