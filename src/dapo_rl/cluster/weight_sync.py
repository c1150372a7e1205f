"""Brings new weights from ranks to engines without the object store: lent on the same GPU, or sent to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dapo_rl.cluster.distributed_policy import DistributedWeights
from dapo_rl.cluster.engine_replica import EngineReplica
from dapo_rl.cluster.weights_broadcast import Address
from dapo_rl.cluster.weights_ipc import BROKEN_OFF, END, LENT_BYTES
from dapo_rl.config import ClusterSettings

LOAD_PATIENCE = 10
"""New weights may take this many times longer than `cluster.timeout_s`."""

Calls = Sequence[tuple[EngineReplica, Any]]


class Delivery:
    def __init__(
        self,
        replicas: Sequence[EngineReplica],
        settings: ClusterSettings,
        dtype: torch.dtype | None,
        device: str,
        or_lost: Callable[[EngineReplica], AbstractContextManager[None]],
    ) -> None:
        """Weights go in `dtype` to engines on the `device`. `or_lost` takes care of an engine that turns out to be
        lost."""
        self._replicas, self._settings, self._dtype, self._device = replicas, settings, dtype, device
        self._or_lost = or_lost
        self._group: tuple[Address, list[Any]] | None = None
        """Where the engines have joined a group, and their actors."""

    @property
    def patience_s(self) -> float:
        return self._settings.timeout_s * LOAD_PATIENCE

    def bring(self, version: int, source: Any) -> bool:
        """Gives all engines new weights; False if some engines need them from the store.

        If the ranks are lost meanwhile, engines do not generate until they get other weights.
        """
        if not all(replica.in_service for replica in self._replicas):
            return False
        if self._settings.weights == "direct" and hasattr(source, "lent"):
            lenders = self._lenders(source)
            return bool(lenders) and self._lend(version, source, lenders)
        if self._settings.weights == "broadcast" and hasattr(source, "send"):
            return self._join(source) and self._send(version, source)
        return False

    def _lenders(self, source: DistributedWeights) -> list[int]:
        """The rank that can lend its weights to each engine; none if an engine is without one, or is lost."""
        ranks, calls = source.lenders(), [(replica, replica.send("memory", self._device)) for replica in self._replicas]
        found = []
        for replica, ref in calls:
            with self._or_lost(replica):
                found.append(replica.result(ref, replica.timeout_s))
        complete = len(found) == len(calls) and set(found) <= set(ranks)
        return [ranks.index(memory) for memory in found] if complete else []

    def _lend(self, version: int, source: DistributedWeights, lenders: Sequence[int]) -> bool:
        """Has each engine read the weights of its rank. One that is lost meanwhile is started with stored ones."""
        reading = dict(zip(self._replicas, lenders, strict=True))
        for replica in reading:
            replica.send("borrow", version, False)

        def feed(handles: Sequence[bytes]) -> None:
            self._hear([(replica, replica.send("feed", own)) for replica, own in zip(reading, handles, strict=True)])
            for replica in [replica for replica in reading if not replica.in_service]:
                del reading[replica]

        try:
            for handles in source.lent(LENT_BYTES, self._dtype, lambda: list(reading.values())):
                feed(handles)
            feed([END] * len(reading))
        except BaseException:
            for replica in reading:
                replica.send("feed", BROKEN_OFF)
            raise
        return True

    def _join(self, source: DistributedWeights) -> bool:
        """Forms a group with the first rank, if there is none of the same members."""
        actors = [replica.actor for replica in self._replicas]
        if (address := source.channel()) is not None and self._group == (address, actors):
            return True
        self._group = None
        address, size, patience_s = source.open_channel(), len(actors) + 1, self._settings.timeout_s / 2
        calls = [
            (replica, replica.send("join", address, index, size, self._device, patience_s))
            for index, replica in enumerate(self._replicas, 1)
        ]
        joined = source.join_channel(size, patience_s)
        if self._hear(calls) and joined:
            self._group = address, actors
            return True
        source.close_channel()
        return False

    def _send(self, version: int, source: DistributedWeights) -> bool:
        """Has all engines load the weights that the first rank sends; False if the group broke meanwhile."""
        for replica in self._replicas:
            replica.send("borrow", version, True)
        group, self._group = self._group, None
        try:
            for bucket in source.layouts(LENT_BYTES, self._dtype):
                calls = self._feed(bucket)
                sent = source.send(bucket)
                if not (self._hear(calls) and sent):
                    self._hear(self._feed(BROKEN_OFF))
                    source.close_channel()
                    return False
            if not self._hear(self._feed(END)):
                return False
        except BaseException:
            self._feed(BROKEN_OFF)
            raise
        self._group = group
        return True

    def _feed(self, handle: Any) -> Calls:
        return [(replica, replica.send("feed", handle)) for replica in self._replicas if replica.in_service]

    def _hear(self, calls: Calls) -> bool:
        answers = []
        for replica, ref in calls:
            with self._or_lost(replica):
                answers.append(replica.result(ref, self.patience_s))
        return len(answers) == len(calls) and all(answers)
