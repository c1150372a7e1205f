"""An engine in a process of its own. One thread runs the engine; the others hand it commands, which it carries out
between two polls of the engine, in the order in which they came."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from dapo_rl.cluster.answer import Answer, sendable
from dapo_rl.cluster.weights_broadcast import Address, ChannelBrokenError, WeightChannel
from dapo_rl.cluster.weights_ipc import BorrowedWeights, BrokenOffError, borrow, memory_of
from dapo_rl.cluster.weights_object_store import StoredWeights, WeightsLostError
from dapo_rl.codec import Shipment
from dapo_rl.engines.protocol import Completion, Engine, Request
from dapo_rl.errors import NonFiniteError
from dapo_rl.types import Trajectory

POLL_S = 0.1
"""Seconds that the engine generates before the thread looks for commands."""
IDLE_S = 0.5
GATHER_S = 0.01
"""An engine that was idle begins when no more requests have come for this long: they are computed together."""
LINGER_S = 0.01
"""A report waits this long for more samples after the first."""

MakeEngine = Callable[[StoredWeights], Engine]


KNOWN = (NonFiniteError, torch.OutOfMemoryError, WeightsLostError)
"""Errors that end no engine, beside mistakes of the user's."""


class Totals(NamedTuple):
    """What an engine has done so far."""

    tokens: int = 0
    """Of finished samples."""
    busy_s: float = 0.0
    """Seconds of generation."""
    preempted: int = 0
    prefix_hits: int = 0

    def plus(self, other: Totals) -> Totals:
        summed: Any = map(sum, zip(self, other, strict=True))
        return Totals(*summed)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine tells the driver."""

    finished: Sequence[tuple[int, int]]
    """Of each finished sample that no earlier report has: the number of its order, and its index."""
    samples: Sequence[Trajectory]
    totals: Totals
    """So far."""
    stuck_s: float
    """For how long the engine has not returned."""
    failure: Exception | None


@dataclass(slots=True)
class _Order:
    number: int
    missing: set[int]


class EngineActor:
    """Runs as a Ray actor. The methods of the group `control` are called in the order in which the driver calls them;
    `collect` is called at the same time as they are."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = SimpleQueue()
        self._news = threading.Condition()
        """Guards what is reported."""
        self._borrowed, self._loaded = BorrowedWeights(), Future[Any]()
        self._channel: WeightChannel | None = None
        self._begin(background=False)
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _begin(self, background: bool) -> None:
        self._background = background
        self._engine: Engine | None = None
        self._orders: dict[str, _Order] = {}
        self._resting = self._incomplete = False
        self._beat = time.monotonic()
        self._tokens, self._busy_s = 0, 0.0
        self._failure: Exception | None = None
        self._done: list[tuple[int, Completion]] = []
        """Finished samples that no report has, with the numbers of their orders."""
        self._hurry = False

    def start(self, make: MakeEngine, weights: StoredWeights, background: bool) -> Answer:
        """Builds the engine, in the place of one that was there before. In the background it generates whenever it has
        work; otherwise in `poll` alone."""

        def build() -> None:
            self._begin(background)
            self._engine = make(weights)

        return self._answer(build)

    def submit(self, numbered: Sequence[tuple[int, Request]]) -> None:
        def add() -> None:
            for number, request in numbered:
                self._orders[request.id] = _Order(number, set(request.indices))
                self._own().submit(request)

        self._commands.put((add, None))

    def cancel(self, ids: Collection[str], numbers: Collection[int]) -> Answer:
        def forget() -> int:
            unwanted = set(numbers)
            with self._news:
                lost = sum(len(c.sample.token_ids) for number, c in self._done if number in unwanted)
                self._done = [entry for entry in self._done if entry[0] not in unwanted]
            for name in ids:
                self._orders.pop(name, None)
            return lost + self._own().cancel(ids)

        return self._answer(forget)

    def take_unfinished(self) -> Answer:
        """The unfinished requests, and the finished samples that no report has; wakes up `collect`."""

        def take() -> tuple[list[Request], EngineReport]:
            requests = self._own().take_unfinished()
            self._keep(self._own().poll())  # what had finished already
            self._orders.clear()
            with self._news:
                self._hurry = True
                self._news.notify_all()
                return requests, self._report()

        return self._answer(take)

    def receive(self, weights: StoredWeights) -> Answer:
        """Loads new weights. If that fails, the engine does not generate any more."""

        def load() -> None:
            self._own().receive(weights.version, weights)
            self._resting = self._incomplete = False

        weights.fetch()
        return self._answer(load)

    def join(self, address: Address, index: int, size: int, device: str, timeout_s: float) -> Answer:
        """Forms a group with the first rank and the other engines; whether it was formed."""
        try:
            self._channel = WeightChannel(address, index, size, device, timeout_s)
        except ChannelBrokenError:
            self._channel = None
        return Answer(self._channel is not None)

    def borrow(self, version: int, sent: bool) -> None:
        """Begins to load new weights, which come by `feed`: lent, or sent to the group. If they break off, the engine
        does not generate until it gets others; if loading fails, it does not generate any more."""
        channel = self._channel if sent else None
        weights, self._loaded = BorrowedWeights(channel.receive if channel else borrow), Future[Any]()
        self._borrowed = weights

        def load() -> bool:
            self._incomplete = True
            try:
                self._own().receive(version, weights)
            except (BrokenOffError, ChannelBrokenError):
                if channel:
                    channel.close()
                return False
            finally:
                weights.close()
            self._resting = self._incomplete = False
            return True

        self._commands.put((load, self._loaded))

    def feed(self, handle: Any) -> Answer:
        """Hands over a bucket, and waits until it has been read; after the last, until the weights are loaded. False if
        they have broken off."""
        return Answer(True) if self._borrowed.feed(handle) else _result(self._loaded)

    def memory(self, device: str) -> Answer:
        """Where it can borrow weights."""
        return Answer(memory_of(device))

    def release_memory(self) -> Answer:
        def stop() -> None:
            self._resting = True
            self._own().release_memory()

        return self._answer(stop)

    def poll(self, timeout_s: float) -> Answer:
        """Generates until samples finish, or for so long."""

        def generate() -> EngineReport:
            self._generate(timeout_s)
            with self._news:
                return self._report()

        return self._answer(generate)

    def close(self) -> Answer:
        def end() -> None:
            if self._engine is not None:
                self._engine.close()

        return self._answer(end)

    def about(self) -> tuple[int, int]:
        """The id of the process, and the number of samples that it has not finished."""
        return os.getpid(), sum(len(order.missing) for order in list(self._orders.values()))

    def collect(self, wait_s: float) -> EngineReport:
        """Waits until samples have finished, and returns them."""
        with self._news:
            self._news.wait_for(lambda: self._done or self._failure or self._hurry, wait_s)
            hurry, self._hurry = self._hurry, False
        if not hurry:
            time.sleep(LINGER_S)
        with self._news:
            return self._report()

    def _report(self) -> EngineReport:
        done, self._done = self._done, []
        engine = self._engine
        counts = (0, 0) if engine is None else (engine.preempted, engine.prefix_hits)
        return EngineReport(
            [(number, completion.index) for number, completion in done],
            Shipment(completion.sample for _, completion in done),
            Totals(self._tokens, self._busy_s, *counts),
            stuck_s=time.monotonic() - self._beat,
            failure=self._failure,
        )

    def _own(self) -> Engine:
        assert self._engine is not None, "start comes first"
        return self._engine

    def _answer(self, command: Callable[[], Any]) -> Answer:
        """Has the engine's thread carry out the command, and waits for it."""
        result: Future[Any] = Future()
        self._commands.put((command, result))
        return _result(result)

    def _run(self) -> None:
        was_idle = True
        while True:
            self._beat = time.monotonic()
            rests = self._resting or self._incomplete or self._failure is not None
            busy = self._background and bool(self._orders) and not rests
            try:
                if busy and not was_idle:
                    command, result = self._commands.get_nowait()
                else:
                    command, result = self._commands.get(timeout=GATHER_S if busy else IDLE_S)
            except Empty:
                was_idle = not busy
                if busy:
                    self._try(lambda: self._generate(POLL_S), None)
                continue
            self._try(command, result)

    def _try(self, command: Callable[[], Any], result: Future[Any] | None) -> None:
        try:
            value = command()
        except BaseException as error:
            with self._news:  # what the engine holds now is not known
                self._failure = self._failure or sendable(error, *KNOWN)
                self._news.notify_all()
            if result is not None:
                result.set_exception(error)
        else:
            if result is not None:
                result.set_result(value)

    def _generate(self, timeout_s: float) -> None:
        assert not self._incomplete, "half a version"
        started = time.perf_counter()
        completions = self._own().poll(timeout_s)
        self._busy_s += time.perf_counter() - started
        self._keep(completions)

    def _keep(self, completions: list[Completion]) -> None:
        done: list[tuple[int, Completion]] = []
        for completion in completions:
            order = self._orders[completion.request_id]
            order.missing.discard(completion.index)
            if not order.missing:
                del self._orders[completion.request_id]
            done.append((order.number, completion))
            self._tokens += len(completion.sample.token_ids)
        if done:
            with self._news:
                self._done += done
                self._news.notify_all()


def _result(future: Future[Any]) -> Answer:
    """Waits for it."""
    try:
        return Answer(future.result())
    except BaseException as error:  # SystemExit among them, of an engine of the user's
        return Answer(error=sendable(error, *KNOWN))
