"""The verifier of a reward model: what it reads of prompts and responses, and its scores as verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dapo_rl.base.quote import printable, shorten
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.custom import DEFAULT_THRESHOLD, conversation
from dapo_rl.rewards.served import Served
from dapo_rl.rewards.validation import failure, fault_of_score
from dapo_rl.types import Prompt, RewardPart, Trajectory, Verdict


class Exchange(NamedTuple):
    """A prompt and a response, in both forms."""

    asked: Sequence[Mapping[str, Any]]
    said: Sequence[Mapping[str, Any]]
    text: str

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return (*self.asked, *self.said)


class Scorer(Protocol):
    """A reward model that is loaded."""

    def score(self, exchanges: Sequence[Exchange]) -> list[float | str]:
        """One score for each, or why there is none."""
        ...

    def release_memory(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A reward model as the caller of the trainer gives it: a name, or a loaded model and its tokenizer."""

    model: Any
    processing_class: Any = None

    @property
    def name(self) -> str:
        if isinstance(self.model, str):
            return self.model
        return getattr(self.model, "name_or_path", "") or type(self.model).__name__


@dataclass(slots=True)
class _Scores:
    """The verdicts of a reward model on a group. They are computed when they are read: the model is then scored
    between two polls of the engine, always for the same samples at a time."""

    verifier: ModelVerifier
    prompt: Prompt
    samples: Sequence[Trajectory]
    futures: Sequence[Future[Any]] = ()
    _verdicts: list[Verdict] = field(default_factory=list)

    def done(self) -> bool:
        return True

    def result(self) -> list[Verdict]:
        if not self._verdicts:
            self._verdicts = self.verifier.judge(self.prompt, self.samples)
        return self._verdicts


class ModelVerifier(Served):
    """Scores with a reward model. A sample is correct if its score is above `reward.threshold`."""

    def __init__(self, given: GivenModel, settings: RewardSettings, name: str) -> None:
        self.given, self.settings, self.name = given, settings, name
        self._scorer: Scorer | None = None

    def load(self, loader: Callable[[GivenModel], Scorer]) -> None:
        self._scorer = loader(self.given)

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory]) -> _Scores:
        return _Scores(self, prompt, tuple(samples))

    def judge(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        if self._scorer is None:
            raise UserError(f"reward.verifier: the reward model {self.given.name} is not loaded here")
        exchanges = [exchange_of(prompt, sample) for sample in samples]
        different = {repr(each): each for each in exchanges}
        scores = dict(zip(different, self._scorer.score(list(different.values())), strict=True))
        return [self._verdict(scores[repr(each)]) for each in exchanges]

    def _verdict(self, score: float | str) -> Verdict:
        fault = score if isinstance(score, str) else fault_of_score(score)
        if isinstance(score, str) or fault:
            return failure(f"the reward model {self.given.name}: {printable(shorten(fault))}", self.settings.wrong)
        threshold = DEFAULT_THRESHOLD if self.settings.threshold is None else self.settings.threshold
        correct = score > threshold
        parts = (RewardPart(self.name, score),)
        return Verdict(score, correct, "correct" if correct else "wrong", parts=parts)

    def release_memory(self) -> None:
        if self._scorer is not None:
            self._scorer.release_memory()


def exchange_of(prompt: Prompt, sample: Trajectory) -> Exchange:
    """What models that judge read: the question without the policy's own template, where it is known."""
    asked, said = conversation(prompt, sample)
    if prompt.messages is None and not sample.episode and prompt.question:
        asked = [{"role": "user", "content": prompt.question}]
    return Exchange(asked, said, prompt.text + sample.text)
