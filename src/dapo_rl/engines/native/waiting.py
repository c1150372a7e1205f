"""Requests in the order of their arrival, each with the samples that still wait.

A sample that gives up its slot returns to the place of its request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace

from dapo_rl.engines.protocol import Request
from dapo_rl.types import Trajectory


class Waiting:
    def __init__(self) -> None:
        self._arrivals: list[int] = []
        self._requests: list[Request] = []
        self._last = 0

    def __iter__(self) -> Iterator[tuple[int, Request]]:
        """Arrival numbers and requests, oldest first; the current request may be changed or taken out."""
        return iter(list(zip(self._arrivals, self._requests, strict=True)))

    @property
    def samples(self) -> int:
        return sum(request.samples for request in self._requests)

    @property
    def requests(self) -> list[Request]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        self._last += 1
        self._arrivals.append(self._last)
        self._requests.append(request)

    def get(self, arrival: int) -> Request | None:
        """What waits of a request."""
        place = bisect_left(self._arrivals, arrival)
        return self._requests[place] if self._arrivals[place : place + 1] == [arrival] else None

    def set(self, arrival: int, request: Request) -> None:
        """Changes what waits of a request; it leaves the queue if nothing does."""
        place = bisect_left(self._arrivals, arrival)
        assert self._arrivals[place] == arrival
        if request.samples:
            self._requests[place] = request
        else:
            del self._arrivals[place], self._requests[place]

    def put_back(
        self, arrival: int, request: Request, begun: Collection[Trajectory], new: Collection[int] = ()
    ) -> None:
        """Returns samples of a request: those with tokens, and the indices of those without."""
        place = bisect_left(self._arrivals, arrival)
        if (waiting := self.get(arrival)) is not None:
            request = waiting
            begun, new = (*begun, *request.begun), (*new, *request.starting)
        else:
            self._arrivals.insert(place, arrival)
            self._requests.insert(place, request)
        ordered = tuple(sorted(begun, key=lambda sample: sample.index))
        self._requests[place] = replace(request, begun=ordered, new=tuple(sorted(new)))

    def cancel(self, ids: Collection[str]) -> int:
        """Removes requests; returns the number of their tokens."""
        lost = sum(request.tokens for request in self._requests if request.id in ids)
        kept = [(a, r) for a, r in self if r.id not in ids]
        self._arrivals, self._requests = [a for a, _ in kept], [r for _, r in kept]
        return lost
