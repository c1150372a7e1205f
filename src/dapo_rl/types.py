"""The vocabulary: frozen records that the parts hand to each other, without behaviour of their own.

A *prompt* is one problem; a *sample* is one response to it; a *verdict* is what the verifier said of a sample;
a *group* is all samples of one draw of a prompt; a *batch* is what one rollout step trains on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]
"""Why the engine ended a sample: a stop token or stop string, or the limit on new tokens."""

VerdictStatus = Literal["correct", "wrong", "unparseable", "timeout", "error"]
"""`timeout` and `error` are failures of the verifier, not of the response."""


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    """Unique in its own data set alone; names the prompt in logs and seeds its random numbers."""
    text: str
    """What the model reads, after the chat template."""
    token_ids: tuple[int, ...]
    answer: str | None = None
    """The ground truth, where the data has one."""
    data_source: str = ""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt as chat messages, where the data gave it so."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, handed on to verifiers unread."""


@dataclass(frozen=True, slots=True)
class Sample:
    token_ids: tuple[int, ...]
    """The response, its end-of-sequence token included."""
    logps: tuple[float, ...]
    """Each token's log-probability under the policy that sampled it, at the sampling temperature, untruncated."""
    text: str
    finish_reason: FinishReason
    versions: tuple[int, int] = (0, 0)
    """The first and the last weight version that wrote tokens of it."""

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


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sample as the update sees it."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    old_logps: tuple[float, ...]
    advantage: float
    group: int
    """Index of its group in the batch."""
    in_loss: bool = True
    """False: masked out (a truncated sample under overlong filtering); it leaves the denominator too."""
    fresh: bool = True
    """Sampled by the weights that the step's first update starts from; false for groups carried over."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """What the reward of one sample is made of, for the run log."""

    reward: float
    length_penalty: float
    advantage: float


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """What the update saw of one sample's tokens, when it last passed over them."""

    logps: tuple[float, ...]
    """Beside the sampled ones they give the ratio, and with the advantage whether it was clipped."""
    entropies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    groups: tuple[Group, ...]
    samples: tuple[tuple[TrainSample, ...], ...]
    """For each group, its samples."""
    scores: tuple[tuple[ScoredSample, ...], ...]


class Verifier(Protocol):
    """Judges the samples of one prompt. It never raises for what a response contains."""

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]: ...


class Pending(Protocol):
    """Verdicts that are being computed."""

    def result(self) -> list[Verdict]:
        """Waits for them."""
        ...
