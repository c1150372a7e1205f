"""Flights: groups in flight, from the draw of a prompt until all its samples have finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from dapo_rl.engines.protocol import Completion, Engine, Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.errors import NonFiniteError
from dapo_rl.rollout.verdicts import STOP_LOOK_S, check_nothing
from dapo_rl.types import Group, Prompt, Trajectory, Verdict


@dataclass(slots=True)
class Flight:
    """A group that is being generated; its samples arrive one by one."""

    draw: int
    prompt: Prompt
    version: int
    """The version of the weights it started with."""
    request: Request
    """The request last submitted to the engine; between steps, the remaining work."""
    samples: list[Trajectory | None]

    @property
    def finished_tokens(self) -> int:
        return sum(sample.written for sample in self.samples if sample is not None)

    def group(self, verdicts: tuple[Verdict, ...] = ()) -> Group:
        """Its finished samples."""
        return Group(self.draw, self.prompt, tuple(sample for sample in self.samples if sample is not None), verdicts)

    @property
    def is_whole(self) -> bool:
        return all(sample is not None for sample in self.samples)


class Flights:
    """All flights by request id. Between steps the engine holds none of them, unless it samples during updates."""

    def __init__(self, engine: Engine, params: SamplingParams, group_size: int, seed: int) -> None:
        self._engine, self._params, self._group_size, self._seed = engine, params, group_size, seed
        self._flights: dict[str, Flight] = {}
        self.next_draw = 0
        self.aboard = False
        """Whether the engine holds them."""

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def start(self, prompt: Prompt) -> Flight:
        """Starts a group for this prompt."""
        draw = self.next_draw
        self.next_draw += 1
        flight = Flight(draw, prompt, self._engine.version, self.request(draw, prompt), [None] * self._group_size)
        self.add(flight)
        self._engine.submit(flight.request)
        return flight

    def add(self, flight: Flight) -> None:
        """Adds a flight, for example from a checkpoint, without submitting it."""
        self._flights[flight.request.id] = flight

    def request(self, draw: int, prompt: Prompt) -> Request:
        """The request for a draw of this prompt: always the same one."""
        return Request(
            id=f"draw-{draw}",
            prompt_ids=prompt.token_ids,
            count=self._group_size,
            params=self._params,
            seed=derive_seed(self._seed, prompt.id, draw),
        )

    def resume(self) -> None:
        """Submits the unfinished requests of the last step, or of an interrupted one, in the order in which the engine
        returned them, unless it still has them."""
        if not self.aboard:
            for flight in self:
                self._engine.submit(flight.request)
        self.aboard = True

    def poll(
        self, timeout_s: float | None = None, check: Callable[[], None] = check_nothing
    ) -> tuple[list[Flight], int]:
        """Runs the engine until samples finish; returns the groups that are now complete, and the number of tokens of
        the finished samples. `check` is called meanwhile; it raises to end the waiting."""
        if timeout_s is None and self._flights:
            completions = poll_engine(self._engine, check)
        else:
            check()
            completions = self._engine.poll(timeout_s)
        if not completions and timeout_s is None and self._flights:
            raise RuntimeError(f"the engine returned nothing with {len(self._flights)} unfinished requests")
        return self._arrived(completions)

    def go_on(self) -> None:
        """Has the engine begin with all that it was given, without a poll."""
        flush: Callable[[], None] | None = getattr(self._engine, "flush", None)
        if flush is not None:
            flush()

    def land(self) -> tuple[list[Flight], int]:
        """Takes all unfinished requests out of the engine, with their tokens. Returns the same as `poll`, for samples
        that had finished and were not polled yet."""
        if not self.aboard:
            return [], 0
        unfinished = {request.id: request for request in self._engine.take_unfinished()}
        whole, tokens = self._arrived(self._engine.poll(0.0))
        self.aboard = False
        if unfinished.keys() != self._flights.keys():
            lost = sorted(unfinished.keys() ^ self._flights.keys())
            raise RuntimeError(f"the engine did not return the requests it was given: {', '.join(lost[:3])}")
        flights, self._flights = self._flights, {}
        for name, request in unfinished.items():
            flights[name].request = request
            self._flights[name] = flights[name]
        return whole, tokens

    def remove(self, unwanted: Callable[[Flight], bool]) -> list[Flight]:
        """Removes flights that the engine does not hold; returns them in the order drawn."""
        removed = [flight for flight in self if unwanted(flight)]
        for flight in removed:
            del self._flights[flight.request.id]
        return sorted(removed, key=lambda flight: flight.draw)

    def _arrived(self, completions: Sequence[Completion]) -> tuple[list[Flight], int]:
        whole: list[Flight] = []
        tokens = 0
        for completion in completions:
            flight = self._arrive(completion)
            tokens += completion.sample.written
            if flight.is_whole:
                whole.append(self._flights.pop(completion.request_id))
        return whole, tokens

    def _arrive(self, completion: Completion) -> Flight:
        flight = self._flights.get(completion.request_id)
        if flight is None or flight.samples[completion.index] is not None:
            raise RuntimeError(
                f"the engine returned sample {completion.index} of {completion.request_id}, which was not requested"
            )
        if not np.isfinite(completion.sample.logps).all():
            raise NonFiniteError("the engine sampled a token whose log-probability is not finite")
        flight.samples[completion.index] = completion.sample
        return flight


def poll_engine(engine: Engine, check: Callable[[], None] = check_nothing) -> list[Completion]:
    """Runs the engine until samples finish. `check` is called every fraction of a second; it raises to end this.

    Only an engine that has no work returns nothing.
    """
    while True:
        check()
        started = monotonic()
        if completions := engine.poll(STOP_LOOK_S):
            return completions
        if monotonic() - started < STOP_LOOK_S / 2:  # it did not use its time: it has no work, or looks too early
            return engine.poll()
