"""The vocabulary: frozen records that the parts hand to each other, over arrays and without behaviour of their own.

A *prompt* is one problem; a *sample* is one response to it; a *verdict* is what the verifier says of a sample; a
*group* is all samples of one draw of a prompt; a *trained group* is a group with its rewards and advantages, and with
what the update saw of its tokens. Whatever there is for each token is an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

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
    """Records are equal where all their fields are, arrays element by element."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def _set_array(self, name: str, value: Any, dtype: Any, length: int | None = None) -> None:
        """Sets an array field from any sequence, or from one value for all `length` tokens."""
        array = np.asarray(value, dtype=dtype)
        if array.ndim == 0 and length is not None:
            array = np.full(length, array)
        if array.ndim != 1 or (length is not None and len(array) != length):
            raise ValueError(f"{type(self).__name__}.{name} has the shape {list(array.shape)}, not [{length}]")
        object.__setattr__(self, name, array)


def _same(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(mine, other)
    return bool(mine == other)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(Record):
    id: str
    """Unique in its own data set alone; names the prompt in logs and seeds its random numbers."""
    text: str
    """What the model reads, after the chat template."""
    token_ids: IntArray
    answer: str | None = None
    """The ground truth, where the data has one."""
    data_source: str = ""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as chat messages, where the data gave it so."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, handed on to verifiers unread."""

    def __post_init__(self) -> None:
        self._set_array("token_ids", self.token_ids, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Sample(Record):
    token_ids: IntArray
    """The response, its end-of-sequence token included."""
    logps: FloatArray
    """Each token's log-probability under the policy that sampled it, at the sampling temperature, untruncated."""
    text: str
    finish_reason: FinishReason
    versions: IntArray = 0  # type: ignore[assignment]
    """The version of the weights that wrote each token; one number stands for all tokens."""
    mask: BoolArray = True  # type: ignore[assignment]
    """True for the tokens that the policy wrote; the others are an environment's."""

    def __post_init__(self) -> None:
        self._set_array("token_ids", self.token_ids, np.int32)
        self._set_array("logps", self.logps, np.float32, len(self.token_ids))
        self._set_array("versions", self.versions, np.int32, len(self.token_ids))
        self._set_array("mask", self.mask, np.bool_, len(self.token_ids))

    @classmethod
    def of_text(cls, text: str, finish_reason: FinishReason = "stop") -> Sample:
        """A response without its tokens."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), text, finish_reason)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    """The reward before length shaping."""
    correct: bool
    status: VerdictStatus
    answer: str | None = None
    """The answer that was extracted from the response, if the verifier extracts one."""
    detail: str = ""
    """Why the verifier failed, where it did."""

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
        """The oldest weights that wrote a token of it."""
        return min(int(s.versions.min(initial=2**31 - 1)) for s in self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample(Record):
    """One sample as the update sees it."""

    prompt_ids: IntArray
    response_ids: IntArray
    old_logps: FloatArray
    advantages: FloatArray
    """Of each token; one number stands for all of them."""
    group: int
    """Index of its group in the batch."""
    in_loss: bool = True
    """False: masked out (a truncated sample under overlong filtering); it leaves the denominator too."""
    fresh: bool = True
    """Sampled by the weights that the step's first update starts from; false for groups carried over."""
    mask: BoolArray = True  # type: ignore[assignment]
    """True for the tokens that the policy wrote: the others are read, not trained on."""
    returns: FloatArray | None = None
    """What a critic learns to predict at each token."""

    def __post_init__(self) -> None:
        length = len(self.response_ids)
        self._set_array("prompt_ids", self.prompt_ids, np.int32)
        self._set_array("response_ids", self.response_ids, np.int32)
        self._set_array("old_logps", self.old_logps, np.float32, length)
        self._set_array("advantages", self.advantages, np.float32, length)
        self._set_array("mask", self.mask, np.bool_, length)
        if self.returns is not None:
            self._set_array("returns", self.returns, np.float32, length)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.mask)) if self.in_loss else 0


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens(Record):
    """What the update saw of one sample's tokens, when it last passed over them."""

    logps: FloatArray
    entropies: FloatArray
    clipped: npt.NDArray[np.int8]
    """Which bound took a token's gradient away: 0 none, 1 the upper, 2 the lower, 3 dual clip's."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group of the batch: as it was judged, as it is rewarded, and as the update saw it."""

    group: Group
    samples: tuple[TrainSample, ...]
    rewards: tuple[float, ...]
    """Of each sample, after the length penalty."""
    length_penalties: tuple[float, ...]
    seen: tuple[SeenTokens | None, ...] | None = None
    """Of each sample, none of those outside the loss; before the update there is nothing."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    metrics: Mapping[str, float]
    """Empty where no sample was in the loss."""
    seen: tuple[SeenTokens | None, ...]
    """For each sample of the mini-batch; none where it is not in the loss."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


class Verifier(Protocol):
    """Judges the samples of one prompt. It never raises for what a response contains."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]: ...


class Pending(Protocol):
    """Verdicts that are being computed."""

    def result(self) -> list[Verdict]:
        """Waits for them."""
        ...

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a turn: the conversation goes on with it."""

    text: str


class Environment(Protocol):
    """Several turns with one prompt: each turn of the policy's is answered by an observation or ends in a verdict.

    A verifier is an environment whose first step ends.
    """

    def step(self, prompt: Prompt, turns: Sequence[Sample]) -> Observation | Verdict: ...
