"""A policy on several ranks, as the driver sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from dapo_rl.cluster.deal import deal
from dapo_rl.types import FloatArray, SeenTokens, TrainSample, Update

PATIENCE = 10
"""Reading and writing of shards may go without progress this many times longer than computation."""


class Ranks(Protocol):
    """Ranks that hold a `RankPolicy` each, however they were started."""

    @property
    def world_size(self) -> int: ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, patience: float = 1
    ) -> list[Any]:
        """Calls a method on every rank, with each rank's arguments; the results by rank."""
        ...

    def close(self) -> None: ...


class RankedPolicy:
    """A Policy whose samples are dealt to ranks. The result is that of one process, up to rounding."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def score(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """The log-probability of each response token under the current policy."""
        if not samples:
            return []
        dealt = deal(samples, self._ranks.world_size)
        scores: dict[int, FloatArray] = {}
        for indices, part in zip(dealt, self._on_shares("score", samples, dealt), strict=True):
            scores |= zip(indices, part, strict=True)
        return [scores[i] for i in range(len(samples))]

    def update(self, samples: Sequence[TrainSample], lr: float) -> Update:
        """One optimizer step on all ranks."""
        seen: list[SeenTokens | None] = [None] * len(samples)
        places = [i for i, sample in enumerate(samples) if sample.trained_tokens]
        if not places:
            return Update({}, tuple(seen))
        trained = [samples[i] for i in places]
        dealt = deal(trained, self._ranks.world_size)
        updates: list[Update] = self._on_shares("update", trained, dealt, lr)
        for indices, update in zip(dealt, updates, strict=True):
            for i, of_sample in zip(indices, update.seen, strict=True):
                seen[places[i]] = of_sample
        notes = dict.fromkeys(note for update in updates for note in update.notes)
        return Update(updates[0].metrics, tuple(seen), tuple(notes))

    def weights(self) -> RankedWeights:
        """The current weights, valid until the next update."""
        return RankedWeights(self._ranks)

    def rest(self) -> None:
        self._ranks.call("rest")

    def save(self, directory: Path) -> None:
        """Every rank writes its shards to `shards/`."""
        self._ranks.call("write_shards", [(directory,)] * self._ranks.world_size, patience=PATIENCE)

    def load(self, directory: Path) -> None:
        """Loads what any number of ranks wrote. A NonFiniteError leaves the policy unchanged."""
        self._ranks.call("load", [(directory,)] * self._ranks.world_size, patience=PATIENCE)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves the model and tokenizer in Hugging Face format."""
        self._ranks.call("export", [(os.fspath(path),)] * self._ranks.world_size, patience=PATIENCE)

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_shares(
        self, method: str, samples: Sequence[TrainSample], dealt: Sequence[Sequence[int]], *more: Any
    ) -> list[Any]:
        return self._ranks.call(method, [([samples[i] for i in indices], *more) for indices in dealt])


class RankedWeights:
    """The weights on the ranks, gathered one bucket at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        sizes: list[tuple[str, int]] = self._ranks.call("weight_sizes")[0]
        bucket: list[str] = []
        size = 0
        for name, more in sizes:
            if bucket and size + more > nbytes:
                yield self._gather(bucket)
                bucket, size = [], 0
            bucket.append(name)
            size += more
        if bucket:
            yield self._gather(bucket)

    def _gather(self, names: list[str]) -> list[tuple[str, Tensor]]:
        tensors = self._ranks.call("full_weights", [(names,)] * self._ranks.world_size)[0]
        return list(zip(names, tensors, strict=True))
