"""A policy on several ranks, as the driver sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from dapo_rl.base.hashing import CancelledError, DeferredWrite, Digests, IsCancelled
from dapo_rl.cluster.balance_batch import deal
from dapo_rl.cluster.weights_broadcast import Address, WeightLayout
from dapo_rl.cluster.weights_ipc import Borrowers
from dapo_rl.codec import Shipment
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.save import done_now
from dapo_rl.types import Array, FloatArray, Trajectory, Update

PATIENCE = 10
"""Reading and writing of shards may go without progress this many times longer than computation."""


class Ranks(Protocol):
    """Ranks that hold a `PolicyWorker` each, however they were started."""

    @property
    def world_size(self) -> int: ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, patience: float = 1
    ) -> list[Any]:
        """Calls a method on every rank, with each rank's arguments; the results by rank."""
        ...

    def call_aside(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]] | None = None,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """`call` in a thread of its own, while `call` is used. `check` raises to abandon it."""
        ...

    def store(self, method: str, *arguments: Any) -> Any:
        """`call` with the same arguments on every rank. The result of the first rank stays in Ray's object store; the
        reference to it."""
        ...

    def close(self, *, kill: bool = False) -> None: ...


class DistributedLearner:
    """A learner whose samples are dealt to ranks. The result is that of one process, up to rounding."""

    of = ""
    """What comes before the names of its methods on the ranks."""
    save_note: str | None

    @property
    def _ranks(self) -> Ranks:
        raise NotImplementedError

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """One number per response token: its log-probability, or the value of the state before it."""
        return self._scored("score", samples)

    def update(self, samples: Sequence[Trajectory], lr: float, *more: Any) -> Update:
        """One optimizer step on all ranks, which take `more` too."""
        columns: list[Mapping[str, Array] | None] = [None] * len(samples)
        places = [i for i, sample in enumerate(samples) if sample.trained_tokens]
        if not places:
            return Update({}, tuple(columns))
        trained = [samples[i] for i in places]
        dealt = deal(trained, self._ranks.world_size)
        self._note_tokens([sum(trained[i].trained_tokens for i in indices) for indices in dealt])
        updates: list[Update] = self._on_shares("update", trained, dealt, lr, *more)
        for indices, update in zip(dealt, updates, strict=True):
            for i, of_sample in zip(indices, update.columns, strict=True):
                columns[places[i]] = of_sample
        notes = dict.fromkeys(note for update in updates for note in update.notes)
        return Update(updates[0].metrics, tuple(columns), tuple(notes))

    def release_memory(self) -> None:
        self._call("release_memory")

    def save(self, directory: Path) -> DeferredWrite:
        """Every rank copies its shards; the result lets each write them. If the hosts have no memory for copies, this
        writes everything itself."""
        ranks = self._ranks
        self._call("copy_shards")

        def write(is_cancelled: IsCancelled) -> Digests:
            def check() -> None:
                if is_cancelled():
                    raise CancelledError

            where = [(directory.absolute(),)] * ranks.world_size
            written: list[Digests] = ranks.call_aside(f"{self.of}write_shards", where, check=check)
            return {name: digest for of_rank in written for name, digest in of_rank.items()}

        return write if self.save_note is None else done_now(write)

    def load(self, directory: Path) -> None:
        """Loads what any number of ranks wrote. A NonFiniteError leaves the learner unchanged."""
        self._call("load", [(directory.absolute(),)] * self._ranks.world_size, patience=PATIENCE)

    def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, patience: float = 1
    ) -> list[Any]:
        return self._ranks.call(f"{self.of}{method}", arguments, patience=patience)

    def _note_tokens(self, of_ranks: Sequence[int]) -> None:
        """Told the tokens that each rank is about to train on."""

    def _scored(self, method: str, samples: Sequence[Trajectory]) -> list[FloatArray]:
        if not samples:
            return []
        dealt = deal(samples, self._ranks.world_size)
        scores: dict[int, FloatArray] = {}
        for indices, part in zip(dealt, self._on_shares(method, samples, dealt), strict=True):
            scores |= zip(indices, part, strict=True)
        return [scores[i] for i in range(len(samples))]

    def _on_shares(
        self, method: str, samples: Sequence[Trajectory], dealt: Sequence[Sequence[int]], *more: Any
    ) -> list[Any]:
        return self._call(method, [(Shipment(samples[i] for i in indices), *more) for indices in dealt])


class DistributedPolicy(DistributedLearner):
    """A policy on ranks; the ranks also have the critic, if there is one."""

    optimizer = None
    """It is on the ranks."""

    def __init__(self, start: Callable[[], Ranks]) -> None:
        """`start` starts the ranks, here and by `restart`."""
        self._start = start
        self._started = start()
        self._tokens = [0] * self._ranks.world_size
        self._looked = time.perf_counter()
        self.note, self.save_note = self._ranks.call("notes")[0]

    @property
    def _ranks(self) -> Ranks:
        return self._started

    def restart(self) -> None:
        """Starts the ranks again, with the model as it was loaded."""
        self._ranks.close(kill=True)
        self._started = self._start()

    def planned(self) -> MemoryPlan:
        """What the ranks keep in GPU memory."""
        plan: MemoryPlan = self._ranks.call("planned")[0]
        return plan

    def stored_buffers(self) -> dict[str, Tensor]:
        """The buffers that are stored in the model's files, such as the biases of a router."""
        buffers: dict[str, Tensor] = self._ranks.call("stored_buffers")[0]
        return buffers

    def score_reference(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The log-probability of each response token under the reference policy."""
        return self._scored("score_reference", samples)

    def sync_reference(self, alpha: float) -> None:
        """Moves the reference policy to the policy, by the share `alpha` of the way."""
        self._call("sync_reference", [(alpha,)] * self._ranks.world_size)

    def score_entropy(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The entropy of the current policy before each response token."""
        return self._scored("score_entropy", samples)

    def figures(self) -> dict[str, float]:
        """What each rank did since the last call: the tokens that it trained on, the share of the time that it spent on
        scores and updates, and its peak memory."""
        now, tokens = time.perf_counter(), self._tokens
        seconds, self._looked, self._tokens = max(now - self._looked, 1e-9), now, [0] * self._ranks.world_size
        metrics: dict[str, float] = {}
        for rank, (busy_s, nbytes) in enumerate(self._ranks.call("work_done")):
            metrics[f"rank/{rank}/tokens"] = tokens[rank]
            metrics[f"rank/{rank}/busy"] = min(1.0, busy_s / seconds)
            metrics[f"rank/{rank}/memory_gib"] = nbytes / 2**30
        return metrics

    def weights(self) -> DistributedWeights:
        """The current weights, valid until the next update."""
        return DistributedWeights(self._ranks)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Saves the model and tokenizer in Hugging Face format."""
        self._call("export", [(os.path.abspath(path),)] * self._ranks.world_size, patience=PATIENCE)

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note_tokens(self, of_ranks: Sequence[int]) -> None:
        self._tokens = [before + more for before, more in zip(self._tokens, of_ranks, strict=True)]


class DistributedCritic(DistributedLearner):
    """The critic on the ranks of a policy."""

    of = "critic."

    def __init__(self, policy: DistributedPolicy) -> None:
        self._policy = policy
        self.note, self.save_note = self._call("notes")[0]

    @property
    def _ranks(self) -> Ranks:
        return self._policy._ranks  # others after a restart


class DistributedWeights:
    """The weights on the ranks, gathered one bucket at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        for names in self._names(nbytes):
            tensors = self._ranks.call("full_weights", [(names,)] * self._ranks.world_size)[0]
            yield list(zip(names, tensors, strict=True))

    def stored(self, nbytes: int, dtype: torch.dtype | None) -> Iterator[Any]:
        """References to the buckets in Ray's object store, in `dtype`. They do not pass through this process."""
        for names in self._names(nbytes):
            yield self._ranks.store("packed_weights", names, dtype)

    def not_finite(self) -> str | None:
        """The name of the first weight that is not finite, or None; they stay on the ranks."""
        name: str | None = self._ranks.call("weights_not_finite")[0]
        return name

    def lenders(self) -> list[str]:
        """The memory of each rank."""
        return self._ranks.call("memory")

    def lent(self, nbytes: int, dtype: torch.dtype | None, borrowers: Borrowers) -> Iterator[list[bytes]]:
        """For each bucket, which is valid until the next, a handle for each borrower."""
        for names in self._names(nbytes):
            lenders = list(borrowers())
            asked = [(names, dtype, lenders.count(rank)) for rank in range(self._ranks.world_size)]
            handles = [iter(of_rank) for of_rank in self._ranks.call("lend_weights", asked)]
            yield [next(handles[rank]) for rank in lenders]
        self._ranks.call("end_lending")

    def channel(self) -> Address | None:
        """Where the group was formed that can be sent to."""
        address: Address | None = self._ranks.call("channel_address")[0]
        return address

    def open_channel(self) -> Address:
        address: Address = self._ranks.call("open_channel")[0]
        return address

    def join_channel(self, size: int, timeout_s: float) -> bool:
        return all(self._ranks.call("join_channel", [(size, timeout_s)] * self._ranks.world_size))

    def layouts(self, nbytes: int, dtype: torch.dtype | None) -> list[list[WeightLayout]]:
        """What `send` sends, by bucket."""
        return [[layout.sent_as(dtype) for layout in bucket] for bucket in self._buckets(nbytes)]

    def send(self, bucket: Sequence[WeightLayout]) -> bool:
        """Sends the weights of a bucket from the first rank; whether all have them."""
        return all(self._ranks.call("send_weights", [(bucket,)] * self._ranks.world_size))

    def close_channel(self) -> None:
        self._ranks.call("close_channel")

    def _names(self, nbytes: int) -> Iterator[list[str]]:
        """The names of the weights in each bucket."""
        for bucket in self._buckets(nbytes):
            yield [layout.name for layout in bucket]

    def _buckets(self, nbytes: int) -> Iterator[list[WeightLayout]]:
        layouts: list[WeightLayout] = self._ranks.call("weight_layouts")[0]
        bucket: list[WeightLayout] = []
        size = 0
        for layout in layouts:
            if bucket and size + layout.nbytes > nbytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(layout)
            size += layout.nbytes
        if bucket:
            yield bucket
