"""The Engine protocol: turns requests into samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dapo_rl.config import SamplingSettings
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import BoolArray, FloatArray, IntArray, Record, Sample


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


@dataclass(frozen=True, slots=True, eq=False)
class Begun(Record):
    """A sample's first tokens: what an engine has written so far, or the turns before the next one."""

    index: int
    """Which of its request's samples it is."""
    token_ids: IntArray
    logps: FloatArray
    versions: IntArray
    mask: BoolArray = True  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._set_array("token_ids", self.token_ids, np.int32)
        self._set_array("logps", self.logps, np.float32, len(self.token_ids))
        self._set_array("versions", self.versions, np.int32, len(self.token_ids))
        self._set_array("mask", self.mask, np.bool_, len(self.token_ids))

    @classmethod
    def nothing(cls, index: int) -> Begun:
        """A sample without tokens."""
        return cls(index, np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))

    def then(self, token_ids: IntArray, logps: FloatArray, version: int) -> Begun:
        """With more tokens of the policy's behind its own."""
        more = len(token_ids)
        return Begun(
            self.index,
            np.concatenate([self.token_ids, token_ids]),
            np.concatenate([self.logps, logps]),
            np.concatenate([self.versions, np.full(more, version, np.int32)]),
            np.concatenate([self.mask, np.ones(more, np.bool_)]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request(Record):
    """A group of `count` samples of one prompt, or those of them that are not finished."""

    id: str
    prompt_ids: IntArray
    count: int
    params: SamplingParams
    """`max_new_tokens` bounds the whole response, the tokens that are there included."""
    seed: int
    """With the sample's index and the token's position it decides every random number of the group."""
    begun: tuple[Begun, ...] = ()
    """Samples that continue."""
    new: tuple[int, ...] | None = None
    """The indices of samples that start from their first token; by default all."""

    def __post_init__(self) -> None:
        self._set_array("prompt_ids", self.prompt_ids, np.int32)
        if self.new is None:
            object.__setattr__(self, "new", tuple(range(self.count)))
        if len({*self.indices}) < self.samples or not all(0 <= index < self.count for index in self.indices):
            raise ValueError(f"Request: {list(self.indices)} are not different samples of {self.count}")

    @property
    def starting(self) -> tuple[int, ...]:
        """`new`, after its default."""
        assert self.new is not None
        return self.new

    @property
    def indices(self) -> tuple[int, ...]:
        return (*(sample.index for sample in self.begun), *self.starting)

    @property
    def samples(self) -> int:
        return len(self.begun) + len(self.starting)

    @property
    def untouched(self) -> bool:
        """Whether nothing of it has been sampled yet."""
        return len(self.starting) == self.count

    def left(self, written: Iterable[Begun]) -> Request:
        """What is left of it: samples with tokens continue, those without start."""
        written = list(written)
        return replace(
            self,
            begun=tuple(begun for begun in written if len(begun.token_ids)),
            new=tuple(begun.index for begun in written if not len(begun.token_ids)),
        )

    @property
    def tokens(self) -> int:
        """Tokens that are there already."""
        return sum(len(sample.token_ids) for sample in self.begun)

    @property
    def longest(self) -> int:
        """The longest context that it may need."""
        return len(self.prompt_ids) + self.params.max_new_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    index: int
    """Which of the request's samples it is."""
    sample: Sample


class Engine(Protocol):
    """What is sampled depends on requests and weights alone, never on how requests were batched."""

    version: int
    """The version of the weights that sample now."""

    def submit(self, request: Request) -> None: ...

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Advances until samples finish, and returns them; returns none after `timeout_s`, or where nothing is left."""
        ...

    def cancel(self, ids: Collection[str]) -> int:
        """Forgets requests; returns the tokens that had been generated for them and are lost."""
        ...

    def receive(self, version: int, source: WeightSource) -> None:
        """Takes over weights. Samples that have begun continue under them."""
        ...

    def take_unfinished(self) -> list[Request]:
        """All unfinished work leaves the engine, with its tokens; submitted again, here or elsewhere, it continues."""
        ...
