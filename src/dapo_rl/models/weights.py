"""Weights on their way from what trains them to what samples with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """The weights of one version, a snapshot, under the names of the model as it was loaded."""

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]: ...


class ModelWeights:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self.tensors.items():
            if bucket and size + tensor.nbytes > nbytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket
