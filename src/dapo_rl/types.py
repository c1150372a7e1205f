"""The shared types: frozen records of arrays, without behaviour.

A *prompt* is one problem; a *sample* is one response to it; a *verdict* is the verifier's result for a sample; a
*group* is all samples of one draw of a prompt; a *trained group* is a group with its rewards, its advantages and the
per-token results of the update. Per-token data is stored in arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length"]
"""Why the engine ended a sample: a stop token or stop string, or the limit on new tokens."""

VerdictStatus = Literal["correct", "wrong", "unparseable", "timeout", "error"]
"""`timeout` and `error` are failures of the verifier, not of the response."""


class Record:
    """Two records are equal if all their fields are; arrays are compared element by element."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def _set_arrays(self, **dtypes: Any) -> None:
        """Makes arrays of one length of these fields. The first may be any sequence; so may the others, or one value
        for all tokens."""
        length: int | None = None
        for name, dtype in dtypes.items():
            given = np.asarray(getattr(self, name))
            if given.dtype.kind == "f" and given.size and np.issubdtype(dtype, np.integer):
                raise ValueError(f"{type(self).__name__}.{name} has numbers that are not whole")
            array = given.astype(dtype, copy=False)
            if array.ndim == 0 and length is not None:
                array = np.full(length, array)
            if array.ndim != 1 or length not in (None, len(array)):
                raise ValueError(f"{type(self).__name__}.{name} has the shape {list(array.shape)}, not [{length}]")
            length = len(array)
            object.__setattr__(self, name, array)


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(mine, other)
    return bool(mine == other)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Record):
    id: str
    """Unique within its data set; names the prompt in logs and seeds its random numbers."""
    text: str
    """The model's input, after the chat template."""
    token_ids: IntArray
    answer: str | None = None
    """The ground truth, if the data has one."""
    data_source: str = ""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as chat messages, if the data has them."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, passed to verifiers unchanged."""
    origin: str = ""
    """The entry of a list of sources that it comes from; empty if there is no list."""

    def __post_init__(self) -> None:
        self._set_arrays(token_ids=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Record):
    token_ids: IntArray
    """The response, including its end-of-sequence token."""
    logps: FloatArray
    """Each token's log-probability under the policy that sampled it, at the sampling temperature, before truncation."""
    text: str
    finish_reason: FinishReason
    versions: IntArray = 0  # type: ignore[assignment]
    """The version of the weights that generated each token; a single number applies to all tokens."""
    mask: BoolArray = True  # type: ignore[assignment]
    """True for tokens that the policy generated, false for tokens from an environment."""

    def __post_init__(self) -> None:
        self._set_arrays(token_ids=np.int32, logps=np.float32, versions=np.int32, mask=np.bool_)

    @classmethod
    def of_text(cls, text: str, finish_reason: FinishReason = "stop") -> Sample:
        """A sample with text but no tokens."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), text, finish_reason)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class RewardPart(NamedTuple):
    """What one reward function adds to a score."""

    name: str
    """Unique among the functions of a run; names the curve of the function."""
    score: float
    """Without the weight."""
    weight: float = 1.0


MOST_LOGGED = 64
"""Names that reward functions may log under, of each kind, in a call and in a step."""
Loggable = str | int | float | bool | None
"""A value that a reward function logs for a sample."""


@dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    """The reward before the length penalty."""
    correct: bool
    status: VerdictStatus
    answer: str | None = None
    """The answer extracted from the response, if the verifier extracts one."""
    detail: str = ""
    """The reason, if the verifier failed."""
    parts: tuple[RewardPart, ...] = ()
    """The functions that the score is the weighted sum of; empty for a built-in verifier alone."""
    extra: Mapping[str, Loggable] = field(default_factory=dict)
    """What reward functions log for this sample (TRL's `log_extra`)."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """What they log for the call (TRL's `log_metric`): sum and number of values. The first verdict of a call has it."""

    @property
    def failed(self) -> bool:
        return self.status in ("timeout", "error")


@dataclass(frozen=True, slots=True)
class Group:
    draw: int
    """The position of this draw in the run: groups are admitted in this order."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.samples)

    @property
    def first_version(self) -> int:
        """The oldest weight version that generated one of its tokens."""
        return min(int(s.versions.min(initial=2**31 - 1)) for s in self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample(Record):
    """One sample as the update sees it."""

    prompt_ids: IntArray
    response_ids: IntArray
    old_logps: FloatArray
    """Under the policy that sampled the tokens."""
    advantages: FloatArray
    """Per token; a single number applies to all tokens."""
    group: int
    """Index of its group in the batch."""
    in_loss: bool = True
    """False for a truncated sample under overlong filtering, which the denominator excludes too."""
    mask: BoolArray = True  # type: ignore[assignment]
    """True for tokens that the policy generated; the others are context only."""
    fresh: BoolArray = True  # type: ignore[assignment]
    """True for tokens that come from the weights that the step's first update starts from; the others were sampled with
    earlier ones."""
    correct: bool = False
    """Whether the verifier judged it correct."""
    values: FloatArray | None = None
    """What a critic expected before each token, at the beginning of the step."""
    returns: FloatArray | None = None
    """The targets of a critic, per token."""
    proximal_logps: FloatArray | None = None
    """Under the policy at the beginning of the step, if that was scored."""

    def __post_init__(self) -> None:
        self._set_arrays(prompt_ids=np.int32)
        optional = {"values": self.values, "returns": self.returns, "proximal_logps": self.proximal_logps}
        others = {name: np.float32 for name, values in optional.items() if values is not None}
        flags = {"mask": np.bool_, "fresh": np.bool_}
        self._set_arrays(response_ids=np.int32, old_logps=np.float32, advantages=np.float32, **flags, **others)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.mask)) if self.in_loss else 0


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens(Record):
    """Per-token results of the last update pass over one sample."""

    logps: FloatArray
    entropies: FloatArray
    clipped: npt.NDArray[np.int8]
    """The bound that clipped a token's gradient: 0 none, 1 upper, 2 lower, 3 dual clip."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group of the batch with its training samples, rewards and per-token results."""

    group: Group
    samples: tuple[TrainSample, ...]
    rewards: tuple[float, ...]
    """Per sample, after the length penalty."""
    length_penalties: tuple[float, ...]
    seen: tuple[SeenTokens | None, ...] | None = None
    """Per sample, with None for samples outside the loss; None before the update."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one optimizer step."""

    metrics: Mapping[str, float]
    """Empty if no sample was in the loss."""
    seen: tuple[SeenTokens | None, ...]
    """Per sample of the mini-batch, with None for samples outside the loss."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


class Verifier(Protocol):
    """Judges the samples of one prompt. It must not raise, whatever the responses contain."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]: ...


class Pending(Protocol):
    """Verdicts that are being computed."""

    def result(self) -> list[Verdict]:
        """Waits for the verdicts and returns them."""
        ...

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's reply to a turn; the conversation continues with it."""

    text: str


class Environment(Protocol):
    """A multi-turn task: each turn of the policy gets an observation, or a verdict that ends the episode.

    A verifier is an environment whose episodes have one turn.
    """

    def step(self, prompt: Prompt, turns: Sequence[Sample]) -> Observation | Verdict: ...
