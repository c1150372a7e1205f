"""The weights of one version in the form that engines load: without adapters, by name, one bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from dapo_rl.models.finite import not_finite

BUCKET_BYTES = 1 << 30


class WeightSource(Protocol):
    """A snapshot of one version of the weights."""

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields every weight once, under its name in the model as loaded. A bucket has at most `nbytes`, or a single
        larger tensor."""
        ...


class PolicyWeights(WeightSource, Protocol):
    def not_finite(self) -> str | None:
        """The name of the first weight that contains an infinity or NaN, or None."""
        ...


class ModelWeights:
    """The live tensors of a model in this process, valid until the next update.

    Adapters are merged bucket by bucket, so that there is never a second copy of all weights.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        # Imports transformers, which a process that only passes weights on does without.
        from dapo_rl.models.lora import plain_weights

        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in plain_weights(self._model):
            if bucket and size + tensor.nbytes > nbytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
            del tensor  # otherwise a merged tensor would outlive its bucket
        if bucket:
            yield bucket

    def not_finite(self) -> str | None:
        return next((name for bucket in self.buckets(BUCKET_BYTES) if (name := not_finite(dict(bucket)))), None)
