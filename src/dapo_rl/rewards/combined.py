"""Several reward functions combined into a weighted sum, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.errors import UserError
from dapo_rl.rewards.judge import judge, trait
from dapo_rl.rewards.user import UserVerifier
from dapo_rl.types import Prompt, Sample, Verdict, Verifier


class CombinedVerifier:
    """The weighted sum of the scores of several verifiers.

    The first verifier that applies to a sample decides whether it is correct, which dynamic sampling filters on. A
    user function that returns None does not apply, and adds nothing. One failed verdict fails the sample.
    """

    def __init__(self, verifiers: Sequence[Verifier], weights: Sequence[float] | None = None) -> None:
        if not verifiers:
            raise UserError("reward functions: the list is empty; give at least one")
        if weights is not None and len(weights) != len(verifiers):
            raise UserError(f"reward weights: {len(weights)} for {len(verifiers)} reward functions; give one for each")
        self.verifiers = tuple(verifiers)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(verifiers)

    @property
    def needs_answer(self) -> bool:
        return any(trait(verifier, "needs_answer") for verifier in self.verifiers)

    @property
    def per_sample(self) -> bool:
        return all(trait(verifier, "per_sample") for verifier in self.verifiers)

    @property
    def text_only(self) -> bool:
        return all(trait(verifier, "text_only") for verifier in self.verifiers)

    def warm_up(self) -> None:
        for verifier in self.verifiers:
            if hasattr(verifier, "warm_up"):
                verifier.warm_up()

    def check(self, prompts: Sequence[Prompt]) -> None:
        for verifier in self.verifiers:
            if hasattr(verifier, "check"):
                verifier.check(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        opinions = [
            verifier.judge(prompt, samples) if isinstance(verifier, UserVerifier) else judge(verifier, prompt, samples)
            for verifier in self.verifiers
        ]
        return [self._combine(of_sample) for of_sample in zip(*opinions, strict=True)]

    def _combine(self, verdicts: Sequence[Verdict | None]) -> Verdict:
        weighted = [(w, v) for w, v in zip(self.weights, verdicts, strict=True) if v is not None]
        if not weighted:
            return Verdict(0.0, False, "error", detail="every reward function returned None")
        for _, verdict in weighted:
            if verdict.failed:
                return verdict
        first = weighted[0][1]
        score = sum(weight * verdict.score for weight, verdict in weighted)
        return Verdict(score, first.correct, first.status, first.answer, first.detail)
