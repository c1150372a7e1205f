"""The Engine protocol: turns prompts into samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from dapo_rl.config import SamplingSettings
from dapo_rl.types import Sample


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Every response has max_new_tokens tokens: for benchmarks."""

    @classmethod
    def of(cls, settings: SamplingSettings) -> SamplingParams:
        """How a run samples what it trains on."""
        return cls(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop=settings.stop,
            ignore_eos=settings.ignore_eos,
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One group to sample: `count` responses to one prompt."""

    id: str
    prompt_ids: tuple[int, ...]
    count: int
    params: SamplingParams
    seed: int
    """With the sample's index and the token's position it decides every random number of the group."""


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    index: int
    """Which of the request's samples it is."""
    sample: Sample


@dataclass(frozen=True, slots=True)
class Begun:
    """A sample of which some tokens are there."""

    index: int
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    version: int
    """The weights that its first token was sampled with."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a request still waits for: samples that have begun, and those from `next_index` on."""

    request: Request
    next_index: int = 0
    begun: tuple[Begun, ...] = ()

    @property
    def samples(self) -> int:
        return self.request.count - self.next_index + len(self.begun)

    @property
    def untouched(self) -> bool:
        return self.next_index == 0

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.begun)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Unfinished:
        request = state["request"]
        params = request["params"]
        return cls(
            request=Request(
                **{
                    **request,
                    "prompt_ids": tuple(request["prompt_ids"]),
                    "params": SamplingParams(**{**params, "stop": tuple(params["stop"])}),
                }
            ),
            next_index=state["next_index"],
            begun=tuple(
                Begun(**{**begun, "token_ids": tuple(begun["token_ids"]), "logps": tuple(begun["logps"])})
                for begun in state["begun"]
            ),
        )


class Engine(Protocol):
    """What is sampled depends on requests and weights alone, never on how requests were batched."""

    version: int
    """The weight version that samples now."""
    keeps_begun: bool
    """Whether samples that have begun go on under new weights, and are part of the state."""

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned."""
        ...

    @property
    def waiting(self) -> frozenset[str]:
        """Requests of which nothing has been sampled yet."""
        ...

    def submit(self, request: Request) -> None: ...

    def poll(self) -> list[Completion]:
        """Advances, and returns the samples that finished; empty only where nothing is pending."""
        ...

    def cancel(self, request_id: str) -> int:
        """Forgets a request; returns the tokens that had been generated for it and are lost."""
        ...

    def load_weights(self, version: int, weights: Mapping[str, Tensor]) -> None: ...

    def state(self) -> dict[str, Any]:
        """The version, and all work in flight, as JSON. What goes on after it, here or elsewhere, is the same."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the place of whatever is in flight."""
        ...


@contextmanager
def set_aside(engine: Engine) -> Iterator[None]:
    """An engine with nothing in flight; what was goes on afterwards."""
    state = engine.state()
    engine.restore({**state, "work": []})
    try:
        yield
    finally:
        engine.restore(state)


def tokens_in_flight(engine: Engine) -> int:
    """Tokens of samples that have begun and are not finished."""
    return sum(Unfinished.from_state(entry).tokens for entry in engine.state()["work"])
