"""A policy on several ranks, as the driver sees it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_rl.base.hashing import CancelledError, DeferredWrite, Digests, IsCancelled
from dapo_rl.cluster.balance_batch import deal
from dapo_rl.cluster.exit_reason import HOST_LOST
from dapo_rl.cluster.ray_ranks import RayRanks
from dapo_rl.cluster.weights_broadcast import Address, WeightLayout
from dapo_rl.cluster.weights_ipc import Borrowers
from dapo_rl.codec import Shipment
from dapo_rl.errors import RankLostError
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.save import done_now
from dapo_rl.types import Array, FloatArray, Trajectory, Update

PATIENCE = 10
"""Reading and writing of shards may go without progress this many times longer than computation."""


class DistributedLearner:
    """A learner whose samples are dealt to ranks. The result is that of one process, up to rounding."""

    of = ""
    """What comes before the names of its methods on the ranks."""
    save_note: str | None
    _tokens: Counter[int]
    """That each rank has trained on since the last look at them."""

    @property
    def _ranks(self) -> RayRanks:
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
        self._tokens.update({rank: sum(trained[i].trained_tokens for i in own) for rank, own in enumerate(dealt)})
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

            written: list[Digests] = ranks.call_aside(f"{self.of}write_shards", directory.absolute(), check=check)
            return {name: digest for of_rank in written for name, digest in of_rank.items()}

        return write if self.save_note is None else done_now(write)

    def load(self, directory: Path) -> None:
        """Loads what any number of ranks wrote. A NonFiniteError leaves the learner unchanged."""
        self._call("load", directory.absolute(), patience=PATIENCE)

    def _call(self, method: str, *arguments: Any, patience: float = 1) -> list[Any]:
        return self._ranks.call(f"{self.of}{method}", *arguments, patience=patience)

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
        shares = [(Shipment(samples[i] for i in indices), *more) for indices in dealt]
        return self._ranks.call_each(f"{self.of}{method}", shares)


class DistributedPolicy(DistributedLearner):
    """A policy on ranks; the ranks also have the critic, if there is one."""

    optimizer = None
    """It is on the ranks."""

    def __init__(self, start: Callable[[], RayRanks]) -> None:
        """`start` starts the ranks, here and by `restart`."""
        self._start = start
        self._started = start()
        self._tokens = Counter()
        self._looked = time.perf_counter()
        self.note, self.save_note = self._ranks.call("notes")[0]

    @property
    def _ranks(self) -> RayRanks:
        return self._started

    def restart(self) -> None:
        """Starts the ranks again, with the model as it was loaded."""
        self._ranks.close(kill=True)
        try:
            self._started = self._start()
        except RankLostError as error:
            if HOST_LOST not in str(error):
                raise
            self._started = self._start()  # until then, Ray has taken the host that was lost for alive

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
        self._call("sync_reference", alpha)

    def score_entropy(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The entropy of the current policy before each response token."""
        return self._scored("score_entropy", samples)

    def figures(self) -> dict[str, float]:
        """What each rank did since the last call: the tokens that it trained on, the share of the time that it spent on
        scores and updates, and its peak memory."""
        now, tokens = time.perf_counter(), self._tokens
        seconds, self._looked, self._tokens = max(now - self._looked, 1e-9), now, Counter()
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
        self._call("export", os.path.abspath(path), patience=PATIENCE)

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()


class DistributedCritic(DistributedLearner):
    """The critic on the ranks of a policy."""

    of = "critic."

    def __init__(self, policy: DistributedPolicy) -> None:
        self._policy, self._tokens = policy, Counter()
        self.note, self.save_note = self._call("notes")[0]

    @property
    def _ranks(self) -> RayRanks:
        return self._policy._ranks  # others after a restart


class DistributedWeights:
    """The weights on the ranks, gathered one bucket at a time."""

    def __init__(self, ranks: RayRanks) -> None:
        self._ranks = ranks

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        for names in self._names(nbytes):
            tensors = self._ranks.call("full_weights", names)[0]
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
            handles = [iter(of_rank) for of_rank in self._ranks.call_each("lend_weights", asked)]
            yield [next(handles[rank]) for rank in lenders]
        self._ranks.call("end_lending")

    def channel(self) -> Address | None:
        """Where the group was formed that can be sent to; None without one."""
        address: Address | None = self._ranks.call("channel_address")[0]
        return address

    def open_channel(self) -> Address:
        """Where a new group is to be formed."""
        address: Address = self._ranks.call("open_channel")[0]
        return address

    def join_channel(self, size: int, timeout_s: float) -> bool:
        """Forms it, with engines that join at the same time; whether it was formed."""
        return all(self._ranks.call("join_channel", size, timeout_s))

    def layouts(self, nbytes: int, dtype: torch.dtype | None) -> list[list[WeightLayout]]:
        """What `send` sends, by bucket."""
        return [[layout.sent_as(dtype) for layout in bucket] for bucket in self._buckets(nbytes)]

    def send(self, bucket: Sequence[WeightLayout]) -> bool:
        """Sends the weights of a bucket from the first rank; whether all have them."""
        return all(self._ranks.call("send_weights", bucket))

    def close_channel(self) -> None:
        self._ranks.call("close_channel")

    def _names(self, nbytes: int) -> list[list[str]]:
        return [[layout.name for layout in bucket] for bucket in self._buckets(nbytes)]

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
