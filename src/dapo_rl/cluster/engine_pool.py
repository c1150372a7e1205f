"""An Engine over many, each in a Ray actor.

A request goes, with all its samples, to the engine with the fewest unfinished samples. Engines generate on their own,
whatever the driver does meanwhile; `poll` collects what has finished. Which engine samples a request makes no
difference: samples follow from the request and the weights.

The driver keeps every request until all its samples have come back. If an engine is lost, what it has not returned is
sampled again on another, from the state in which it was submitted; the engine is started again with the current
weights. A sample comes back once: reports name the order that a sample belongs to, and an order is closed when it is
given to another engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dapo_rl.base.format import counted
from dapo_rl.cluster.engine_actor import EngineReport, MakeEngine
from dapo_rl.cluster.engine_replica import EngineLostError, EngineReplica, Order
from dapo_rl.cluster.ray_session import import_ray, ray_logs
from dapo_rl.cluster.weight_sync import Delivery
from dapo_rl.cluster.weights_object_store import StoredWeights, WeightsLostError
from dapo_rl.config import ClusterSettings
from dapo_rl.engines.protocol import Completion, Engine, EngineFigures, Request
from dapo_rl.errors import RankLostError, UserError
from dapo_rl.models.weights import WeightSource

LOOK_S = 0.25
"""Seconds between looks at engines that are lost or starting."""
START_S = 600.0
"""Seconds that an engine may take to start."""
ROOM = "the cluster may not have room for it: `ray status` shows what is free"
CLOSE_S = 5.0


class EnginePool(Engine):
    version = 0

    def __init__(
        self,
        make: MakeEngine,
        weights: WeightSource,
        settings: ClusterSettings,
        *,
        background: bool = True,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Starts `settings.engines` engines, and returns when all are in service. Ray is connected.

        Without `background` an engine generates in `poll` alone, so that one engine in the pool does exactly what it
        does outside it. Weights are sent in `dtype`, to engines on the `device`. `options` are those of Ray for the
        actors. `note` is told of engines that are lost.
        """
        self._ray = import_ray()
        self._settings, self._background, self._dtype = settings, background, dtype
        self._note = note
        self._make = self._ray.put(make)
        self._source = weights
        self._stored: StoredWeights | None = None
        """The current weights, if they are in the object store."""
        self._ranks_lost: RankLostError | None = None
        """Why engines are absent: there were no weights to start them with."""
        how = (background, settings.timeout_s, options or {})
        self._replicas = [EngineReplica(index, *how) for index in range(settings.engines)]
        self._delivery = Delivery(self._replicas, settings, dtype, device, self._or_lost)
        self._next = 0
        self._waiting: list[Order] = []
        """Orders while no engine is in service."""
        self._finished: list[Completion] = []
        self._served = time.monotonic()
        """When an engine was last in service."""
        self._looked = time.perf_counter()
        self._seen = [replica.totals for replica in self._replicas]
        try:
            self._start(self._replicas)
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        orders = [*self._waiting, *(order for replica in self._replicas for order in replica.orders.values())]
        return len(self._finished) + sum(len(order.missing) for order in orders)

    @property
    def preempted(self) -> int:
        return sum(replica.totals.preempted for replica in self._replicas)

    @property
    def prefix_hits(self) -> int:
        return sum(replica.totals.prefix_hits for replica in self._replicas)

    def submit(self, request: Request) -> None:
        """Gives a request to the engine with the least work."""
        order = Order(self._next, request, set(request.indices))
        self._next += 1
        there = [replica for replica in self._replicas if replica.in_service]
        if there:
            min(there, key=lambda replica: replica.load).submit(order)
        else:
            self._waiting.append(order)

    def flush(self) -> None:
        """Sends all requests to the engines."""
        for replica in self._replicas:
            replica.flush()

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        self.flush()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._finished and self.pending:
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                break
            self._tend()
            busy = [replica for replica in self._replicas if replica.in_service and replica.orders]
            if not busy:
                time.sleep(min(left, 0.02))
            elif self._background:
                self._collect(busy, left)
            else:
                self._step(busy, left)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, ids: Collection[str]) -> int:
        unwanted = set(ids)
        lost = sum(len(done.sample.token_ids) for done in self._finished if done.request_id in unwanted)
        self._finished = [done for done in self._finished if done.request_id not in unwanted]
        lost += sum(order.left().tokens for order in self._waiting if order.request.id in unwanted)
        self._waiting = [order for order in self._waiting if order.request.id not in unwanted]
        calls = []
        for replica in self._replicas:
            numbers = [number for number, order in replica.orders.items() if order.request.id in unwanted]
            if numbers:
                names = [replica.orders.pop(number).request.id for number in numbers]
                calls.append((replica, replica.send("cancel", names, numbers)))
        for replica, ref in calls:
            with self._or_lost(replica):
                lost += replica.result(ref, replica.timeout_s)
        return lost

    def receive(self, version: int, source: WeightSource) -> None:
        """Gives all engines new weights; the source is valid until the next call.

        From the object store: engines generate until all weights are on their hosts; each then stops between two decode
        steps, loads them, and goes on. Otherwise (`cluster.weights`) engines stop and read them bucket by bucket.
        """
        self.version, self._source, self._stored, self._ranks_lost = version, source, None, None
        if not self._delivery.bring(version, source):
            absent = [replica for replica in self._replicas if replica.absent]
            self._everywhere("receive", self._in_store())
            self._start(absent)
        for replica in self._replicas:
            replica.version = version

    def release_memory(self) -> None:
        self._everywhere("release_memory")

    def take_unfinished(self) -> list[Request]:
        """What has finished meanwhile is returned by the next `poll`."""
        taken: list[Request] = []
        calls = [(replica, replica.send("take_unfinished")) for replica in self._replicas if replica.in_service]
        for replica, ref in calls:
            with self._or_lost(replica):
                requests, last = replica.result(ref, replica.timeout_s)
                if self._background:
                    self._take(replica, replica.report())  # what it was reporting meanwhile
                self._take(replica, last)
                _check_same(replica, requests)
                replica.orders.clear()
                taken += requests
        waiting, self._waiting = self._waiting, []  # with those of engines that have just been lost
        return [*taken, *(order.left() for order in waiting)]

    def figures(self) -> list[EngineFigures]:
        """What each engine did since the last call."""
        now, before, seen = time.perf_counter(), self._seen, [replica.totals for replica in self._replicas]
        seconds = max(now - self._looked, 1e-9)
        self._looked, self._seen = now, seen
        return [
            EngineFigures(
                queue=replica.load,
                version=replica.version,
                tokens_per_s=(totals.tokens - old.tokens) / seconds,
                busy=min(1.0, (totals.busy_s - old.busy_s) / seconds),
                lost=replica.lost,
            )
            for replica, totals, old in zip(self._replicas, seen, before, strict=True)
        ]

    def close(self) -> None:
        """Ends all engines."""
        calls = [replica.send("close") for replica in self._replicas if replica.in_service]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
        for replica in self._replicas:
            replica.end()

    def _await_start(self) -> None:
        """Waits until all engines are in service."""
        end = time.monotonic() + START_S
        for replica in self._replicas:
            while not replica.in_service:
                if self._ranks_lost is not None:
                    raise self._ranks_lost
                with self._or_lost(replica):
                    try:
                        there = replica.started(max(0.0, end - time.monotonic()))
                    except EngineLostError as error:
                        if error.more:  # it would fail again
                            raise UserError(f"engine {replica.index} cannot be started: {error}", error.more) from None
                        raise
                    if not there:
                        raise UserError(
                            f"cluster.engines: engine {replica.index} of {len(self._replicas)} did not start within "
                            f"{START_S:.0f} s; {ROOM}"
                        )

    def _in_store(self) -> StoredWeights:
        """The current weights, which are stored if they are not, or not any more."""
        if self._stored is None or self._stored.lost:
            self._stored = StoredWeights.put(self.version, self._source, self._dtype)
        return self._stored

    def _start(self, replicas: Sequence[EngineReplica]) -> None:
        for replica in replicas:
            replica.start(self._make, self._in_store())

    def _tend(self) -> None:
        """Looks after engines that do not answer, are lost, or are starting again, and after the orders of these."""
        for replica in self._replicas:
            with self._or_lost(replica):
                if replica.in_service:
                    replica.check()
                else:
                    replica.started(0)
        if any(replica.in_service for replica in self._replicas):
            self._served = time.monotonic()
        elif self._ranks_lost is not None and all(replica.absent for replica in self._replicas):
            raise self._ranks_lost
        elif time.monotonic() > self._served + START_S:
            raise UserError(f"cluster.engines: no engine is left, and none started within {START_S:.0f} s; {ROOM}")
        if self._waiting and any(replica.in_service for replica in self._replicas):
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self.submit(order.left())
            self.flush()

    def _collect(self, busy: Sequence[EngineReplica], timeout_s: float) -> None:
        """Takes the reports of engines as they come."""
        asked = {replica.asks(): replica for replica in busy}
        ready, _ = self._ray.wait(list(asked), timeout=timeout_s)
        if ready and len(asked) > 1:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for ref in ready:
            with self._or_lost(asked[ref]):
                self._take(asked[ref], asked[ref].report())

    def _step(self, busy: Sequence[EngineReplica], timeout_s: float) -> None:
        """Has engines generate until each has finished samples."""
        calls = [(replica, replica.send("poll", timeout_s)) for replica in busy]
        for replica, ref in calls:
            with self._or_lost(replica):
                self._take(replica, replica.result(ref, timeout_s + replica.timeout_s))

    def _take(self, replica: EngineReplica, report: EngineReport) -> None:
        replica.note(report)
        for (number, index), sample in zip(report.finished, report.samples, strict=True):
            order = replica.orders.get(number)
            if order is None or index not in order.missing:
                continue  # it was cancelled
            order.missing.discard(index)
            if not order.missing:
                del replica.orders[number]
            self._finished.append(Completion(order.request.id, index, sample))

    def _everywhere(self, method: str, *arguments: Any) -> None:
        """Calls a method of all engines, and waits for those in service; those that start carry it out afterwards."""
        calls = [(replica, replica.send(method, *arguments)) for replica in self._replicas if not replica.absent]
        for replica, ref in calls:
            if replica.in_service:
                with self._or_lost(replica):
                    replica.result(ref, self._delivery.patience_s)

    @contextmanager
    def _or_lost(self, replica: EngineReplica) -> Iterator[None]:
        """Starts an engine again that turns out to be lost. Its orders wait for another. If the weights were lost too,
        with the ranks, it stays absent until there are new ones."""
        try:
            yield
        except (EngineLostError, WeightsLostError) as error:
            orders = replica.end()
            self._waiting += orders
            self._served = time.monotonic()  # it may be long since the last look
            if isinstance(error, EngineLostError):
                self._count_loss(replica, error, len(orders))
            else:  # Ray did not know of it when the engine was given them
                self._stored = None
            try:
                self._start([replica])
            except RankLostError as lost:
                self._ranks_lost = lost

    def _count_loss(self, replica: EngineReplica, error: EngineLostError, groups: int) -> None:
        """Raises if it was one too many."""
        replica.lost += 1
        if replica.lost > self._settings.restarts:
            advice = error.advice or (f"look for the cause in {ray_logs()}" if not error.more else "see below")
            times = "once" if replica.lost == 1 else f"{replica.lost} times"
            raise UserError(
                f"engine {replica.index} was lost {times}, and cluster.restarts is {self._settings.restarts}; "
                f"the last time: {error}; {advice}",
                error.more,
            ) from None
        again = f"; {counted(groups, 'group')} will be sampled again" if groups else ""
        self._note(f"engine {replica.index} was lost: {error}{again}")


def _check_same(replica: EngineReplica, requests: Sequence[Request]) -> None:
    """An engine returns every sample that it has not finished."""
    returned = {request.id: set(request.indices) for request in requests}
    expected = {order.request.id: order.missing for order in replica.orders.values()}
    if returned != expected:
        wrong = next(name for name in {**expected, **returned} if expected.get(name) != returned.get(name))
        raise RuntimeError(f"engine {replica.index} returned other samples of {wrong} than are unfinished")
