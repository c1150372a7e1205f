"""One engine of a pool, as the driver sees it: its actor, and the orders that it has not finished."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dapo_rl.cluster.answer import Answer
from dapo_rl.cluster.engine_actor import EngineActor, EngineReport, Totals
from dapo_rl.cluster.exit_reason import LESS_FOR_ENGINES, describe_loss, for_want_of_memory, losses
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.cluster.weights_object_store import StoredWeights
from dapo_rl.engines.protocol import Request
from dapo_rl.errors import UserError

FIRST_PATIENCE = 10
"""The first samples of an engine may take this many times longer than `cluster.timeout_s`: kernels are compiled."""
REPORT_S = 1.0
"""Seconds after which an engine reports, even if no sample has finished."""
MOMENT_S = 1.0
"""Seconds that an answer may take to be read."""
AT_ONCE = 32
"""Orders that are sent together. A call costs the driver as much as the rest that it does for a group."""
CONTROL, COLLECT = "control", "collect"
"""Groups of methods, each with a thread."""


class EngineLostError(Exception):
    """The actor has ended, does not answer, or has failed. `more` is the traceback of a failure; `advice` is what to do
    if it happens again, if that is known."""

    def __init__(self, message: str, more: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.more, self.advice = more, advice


@dataclass(slots=True)
class Order:
    """A request on its way, and the samples of it that have not come back."""

    number: int
    request: Request
    """As it was submitted."""
    missing: set[int]

    def left(self) -> Request:
        """The request without the samples that have come back. What an engine generated of the others is not known."""
        partial = tuple(sample for sample in self.request.partial if sample.index in self.missing)
        new = tuple(index for index in self.request.starting if index in self.missing)
        return replace(self.request, partial=partial, new=new)


class EngineReplica:
    """Starts the actor, and starts another in its place after it was lost."""

    def __init__(self, index: int, background: bool, timeout_s: float, options: Mapping[str, Any]) -> None:
        self.index, self._background, self._timeout_s = index, background, timeout_s
        self._ray = import_ray()
        self._class = self._ray.remote(concurrency_groups={CONTROL: 1, COLLECT: 1})(EngineActor)
        self._options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **options}
        self.actor: Any = None
        """Another one after each start."""
        self._starting: Any = None
        self._collecting: Any = None
        self._asked = 0.0
        self._earlier, self._now = Totals(), Totals()
        self.orders: dict[int, Order] = {}
        self._unsent: list[tuple[int, Request]] = []
        self.version = 0
        self.lost = 0
        """How often."""

    @property
    def load(self) -> int:
        """Samples that it has not finished."""
        return sum(len(order.missing) for order in self.orders.values())

    @property
    def absent(self) -> bool:
        """Whether it is neither in service nor starting."""
        return self.actor is None

    @property
    def in_service(self) -> bool:
        return self.actor is not None and self._starting is None

    @property
    def timeout_s(self) -> float:
        """How long it may go without progress."""
        return self._timeout_s if self._now.tokens else self._timeout_s * FIRST_PATIENCE

    @property
    def totals(self) -> Totals:
        """Over all its actors."""
        return self._earlier.plus(self._now)

    def start(self, make: Any, weights: StoredWeights) -> None:
        """`make` is a MakeEngine in the object store. Does not wait."""
        self.actor = self._new_actor()
        self._starting = self.send("start", make, weights, self._background)
        self.version = weights.version

    def started(self, timeout_s: float) -> bool:
        """Whether the engine is in service, after so long at most."""
        if self._starting is None:
            return True
        if not self._ray.wait([self._starting], timeout=timeout_s)[0]:
            return False
        self.result(self._starting)
        self._starting = None
        return True

    def submit(self, order: Order) -> None:
        """Adds an order. It is sent with others, by `flush` or before the next call."""
        self.orders[order.number] = order
        self._unsent.append((order.number, order.request))
        if len(self._unsent) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Sends the orders that have not been sent yet."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self.send("submit", unsent)

    def send(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the actor; `result` waits for it."""
        self.flush()
        return getattr(self.actor, method).options(concurrency_group=CONTROL).remote(*arguments)

    def asks(self) -> Any:
        """The report that the engine was asked for."""
        if self._collecting is None:
            collect = self.actor.collect.options(concurrency_group=COLLECT)
            self._collecting, self._asked = collect.remote(REPORT_S), time.monotonic()
        return self._collecting

    def report(self) -> EngineReport:
        """What the engine reports; waits for it."""
        ref, self._collecting = self.asks(), None
        report: EngineReport = self.result(ref, REPORT_S + self.timeout_s)
        self.note(report)
        if report.stuck_s > self.timeout_s and self.orders:
            raise EngineLostError(f"no progress for {report.stuck_s:.0f} s")
        return report

    def check(self) -> None:
        """Raises if it has not reported for too long."""
        late = self._collecting is not None and time.monotonic() > self._asked + REPORT_S + self._timeout_s
        # A report can be on its way after this process was stopped (Ctrl-Z), and a long one stays on another host.
        if late and not self._ray.wait([self._collecting], timeout=MOMENT_S, fetch_local=False)[0]:
            raise EngineLostError(f"no answer for {self._timeout_s:g} s")

    def note(self, report: EngineReport) -> None:
        self._now = report.totals

    def end(self) -> list[Order]:
        """Ends the actor; returns the orders that it has not finished."""
        if self.actor is not None:
            self._end_actor()
        self.actor = self._starting = self._collecting = None
        self._earlier, self._now = self.totals, Totals()
        orders, self.orders, self._unsent = list(self.orders.values()), {}, []
        return orders

    def result(self, ref: Any, timeout_s: float | None = None) -> Any:
        """The result of a call. A mistake of the user's is raised as it was; after any other failure the engine counts
        as lost."""
        errors = self._ray.exceptions
        try:
            value = self._ray.get(ref, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise EngineLostError(f"no answer for {timeout_s:g} s") from None
        except (*losses(self._ray), errors.ObjectLostError) as error:
            advice = LESS_FOR_ENGINES if for_want_of_memory(self._ray, error) else ""
            raise EngineLostError(f"it {describe_loss(self._ray, error)}", advice=advice) from None
        result, failure = (value.value, value.error) if isinstance(value, Answer) else (value, None)
        if isinstance(result, EngineReport):
            failure = failure or result.failure
        if failure is None:
            return result
        if isinstance(failure, UserError):
            raise failure
        text = str(failure)
        if type(failure) is RuntimeError:
            raise EngineLostError(f"it failed with {text.strip().rpartition(chr(10))[2]}", text)
        raise type(failure)(f"engine {self.index}: {text}")

    def _new_actor(self) -> Any:
        return self._class.options(**self._options).remote()

    def _end_actor(self) -> None:
        self._ray.kill(self.actor)
