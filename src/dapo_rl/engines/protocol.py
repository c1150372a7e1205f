"""The Engine protocol, which turns requests into samples, and its records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from dapo_rl.config import SamplingSettings
from dapo_rl.models.weights import WeightSource
from dapo_rl.types import IntArray, Record, Trajectory


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
    """Every response has exactly max_new_tokens tokens; for benchmarks."""
    staged: bool = False
    """Whether max_new_tokens changes in a run. Samples record it then."""
    keep_mask: bool = False
    """Whether samples have the column `kept_ids`: the tokens that truncation kept, at most `top_k`. Their
    log-probabilities are then those of the truncated distribution."""

    def __post_init__(self) -> None:
        if self.keep_mask and self.top_k < 1:
            raise ValueError("SamplingParams: keep_mask needs top_k, the most tokens that are kept")

    @classmethod
    def of(cls, settings: SamplingSettings) -> SamplingParams:
        """The parameters with which a run samples its training data."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls) if each.name != "staged"})

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p can exclude tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def most_kept(self) -> int:
        """The width of `kept_ids`; 0 without it."""
        return self.top_k if self.keep_mask else 0


@dataclass(frozen=True, slots=True, eq=False)
class Request(Record):
    """A group of `count` samples of one prompt, or the unfinished ones among them."""

    id: str
    prompt_ids: IntArray
    count: int
    params: SamplingParams
    """`max_new_tokens` limits the whole response, including tokens generated earlier."""
    seed: int
    """Determines every random number of the group, together with the sample's index and the token's position."""
    partial: tuple[Trajectory, ...] = ()
    """Partial samples to continue."""
    new: tuple[int, ...] | None = None
    """Indices of the samples to generate from their first token; all by default."""
    limits: tuple[int, ...] | None = None
    """`max_new_tokens` of each sample, at most that of `params`; for benchmarks."""
    continues: bool = False
    """Whether samples are likely to be continued, after an observation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", np.asarray(self.prompt_ids, np.int32))
        if self.new is None:
            object.__setattr__(self, "new", tuple(range(self.count)))
        if len({*self.indices}) < self.samples or not all(0 <= index < self.count for index in self.indices):
            raise ValueError(f"Request: {list(self.indices)} are not different samples of {self.count}")
        if self.limits is not None and (
            len(self.limits) != self.count or not all(0 < limit <= self.params.max_new_tokens for limit in self.limits)
        ):
            raise ValueError(f"Request: {self.limits} are not {self.count} limits of 1 to {self.params.max_new_tokens}")

    @property
    def starting(self) -> tuple[int, ...]:
        """`new`, with its default applied."""
        assert self.new is not None
        return self.new

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Its samples with their tokens so far."""
        return (*self.partial, *map(Trajectory.nothing, self.starting))

    @property
    def indices(self) -> tuple[int, ...]:
        return (*(sample.index for sample in self.partial), *self.starting)

    @property
    def samples(self) -> int:
        return len(self.partial) + len(self.starting)

    @property
    def untouched(self) -> bool:
        """Whether none of its samples has tokens yet."""
        return len(self.starting) == self.count

    def params_of(self, index: int) -> SamplingParams:
        """The parameters of one of its samples."""
        return self.params if self.limits is None else replace(self.params, max_new_tokens=self.limits[index])

    def left(self, written: Iterable[Trajectory]) -> Request:
        """The remaining request: samples with tokens continue, those without start."""
        written = list(written)
        return replace(
            self,
            partial=tuple(partial for partial in written if len(partial.token_ids)),
            new=tuple(partial.index for partial in written if not len(partial.token_ids)),
        )

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(sample.written for sample in self.partial)

    @property
    def longest(self) -> int:
        """The longest context that it can reach."""
        return len(self.prompt_ids) + self.params.max_new_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    index: int
    """The sample's index in the request."""
    sample: Trajectory


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one of several engines did since the last look."""

    queue: int
    """Samples that it has not finished."""
    version: int
    tokens_per_s: float
    """Tokens of finished samples."""
    busy: float
    """Share of the time in which it generated."""
    lost: int
    """How often it was lost since the start of the run."""


class Engine(Protocol):
    """Generates samples. They depend on requests and weights alone, not on how requests are batched.

    Subclasses inherit the methods below that have a default.
    """

    @property
    def version(self) -> int:
        """The version of the weights in use; 0 at first."""
        ...

    @property
    def preempted(self) -> int:
        """How often a sample had to wait in mid-generation because memory ran out."""
        return 0

    @property
    def prefix_hits(self) -> int:
        """Tokens of continued samples whose keys and values did not have to be computed again."""
        return 0

    def submit(self, request: Request) -> None: ...

    def flush(self) -> None:
        """Starts on all submitted requests without waiting for a poll, if the engine can."""
        return None

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Generates until samples finish, and returns them; returns [] after `timeout_s` or if there is no work."""
        ...

    def cancel(self, ids: Collection[str]) -> int:
        """Cancels requests; returns the number of generated tokens that are lost."""
        ...

    def receive(self, version: int, source: WeightSource) -> None:
        """Loads new weights. Unfinished samples continue with them."""
        ...

    def take_unfinished(self) -> list[Request]:
        """Removes and returns all unfinished requests with their tokens. Resubmitted, here or elsewhere, they continue
        where they stopped. Finished samples are returned by the next `poll`."""
        ...

    def release_memory(self) -> None:
        """Frees the GPU memory of weights and KV cache until the next `receive`, if the engine was built for that.
        Unfinished samples are kept with their tokens."""
        return None

    def figures(self) -> list[EngineFigures]:
        """What each engine of several did since the last call."""
        return []

    def cache_figures(self) -> dict[str, int | None]:
        """How full the KV cache was, for benchmarks."""
        return {}

    def close(self) -> None:
        """Ends the engine's processes and frees its memory."""
        return None


def engine_metrics(engine: Engine) -> dict[str, float]:
    """The figures of each of several engines since the last call, by its number."""
    figures = engine.figures()
    return {f"engine/{i}/{name}": value for i, of_one in enumerate(figures) for name, value in asdict(of_one).items()}


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """What an engine is built from."""

    model: Any
    tokenizer: Any
    settings: SamplingSettings
    dtype: torch.dtype
    """The type to compute in."""
    longest: int = 0
    """The longest context of the run; 0 if unknown."""
    copies: bool = True
    """Whether the model is used elsewhere too, so that an engine that changes it needs a copy."""
    kv_bytes: int | None = None
    """Size of the KV cache, unless the settings give it."""
    releases_memory: bool = False
    """Whether `release_memory` will be called."""
    gpus: int = 1
    gpu_share: float | None = None
    """Share of each GPU's memory that is the engine's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The setting `engine_options`."""
