"""The verifier of a reward model: what it reads of prompts and responses, and its scores as verdicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dapo_rl.base.quote import printable, shorten
from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.custom import conversation
from dapo_rl.rewards.served import Served
from dapo_rl.rewards.validation import failure, fault_of_score
from dapo_rl.types import Prompt, Trajectory, Verdict


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

    def score(self, groups: Sequence[Sequence[Exchange]]) -> list[list[float | str]]:
        """One score for each of a group, or why there is none."""
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


@dataclass(slots=True, weakref_slot=True)
class _Scores:
    """The verdicts of a reward model on a group. They are computed between two polls of the engine, when those of any
    group are read."""

    verifier: ModelVerifier
    prompt: Prompt
    samples: Sequence[Trajectory]
    dropped: Callable[[], bool]
    """Whether other verdicts drop the group; then it has none of these."""
    futures: Sequence[Future[Any]] = ()
    verdicts: list[Verdict] = field(default_factory=list)

    def done(self) -> bool:
        return True

    def result(self) -> list[Verdict]:
        if self.dropped():
            return []
        if not self.verdicts:
            self.verifier.judge_waiting()
        return self.verdicts


class ModelVerifier(Served):
    """Scores with a reward model. A sample is correct if its score is above `reward.threshold`."""

    def __init__(self, given: GivenModel, settings: RewardSettings, name: str) -> None:
        self.given, self.settings, self.name = given, settings, name
        self._scorer: Scorer | None = None
        self._waiting: list[weakref.ref[_Scores]] = []
        """Groups without verdicts, unless their run has dropped them."""

    def load(self, loader: Callable[[GivenModel], Scorer]) -> None:
        self._scorer = loader(self.given)

    def submit(
        self, prompt: Prompt, samples: Sequence[Trajectory], dropped: Callable[[], bool] = lambda: False
    ) -> _Scores:
        scores = _Scores(self, prompt, tuple(samples), dropped)
        self._waiting.append(weakref.ref(scores))
        return scores

    def judge_waiting(self) -> None:
        """Gives all groups that wait their verdicts."""
        if self._scorer is None:
            raise UserError(f"reward.verifier: the reward model {self.given.name} is not loaded here")
        waiting = [scores for ref in self._waiting if (scores := ref()) is not None and not scores.dropped()]
        exchanges = [[exchange_of(scores.prompt, sample) for sample in scores.samples] for scores in waiting]
        different = [{repr(each): each for each in group} for group in exchanges]
        found = self._scorer.score([list(group.values()) for group in different])
        for scores, group, names, values in zip(waiting, exchanges, different, found, strict=True):
            by_name = dict(zip(names, values, strict=True))
            scores.verdicts = [self._verdict(by_name[repr(each)]) for each in group]
        self._waiting.clear()

    def _verdict(self, score: float | str) -> Verdict:
        fault = score if isinstance(score, str) else fault_of_score(score)
        if isinstance(score, str) or fault:
            return failure(f"the reward model {self.given.name}: {printable(shorten(fault))}", self.settings.wrong)
        return self.scored(score)

    def release_memory(self) -> None:
        if self._scorer is not None:
            self._scorer.release_memory()


def exchange_of(prompt: Prompt, sample: Trajectory) -> Exchange:
    """What models that judge read: the question without the policy's own template, where it is known."""
    asked, said = conversation(prompt, sample)
    if prompt.messages is None and not sample.episode and prompt.question:
        asked = [{"role": "user", "content": prompt.question}]
    return Exchange(asked, said, prompt.text + sample.text)
