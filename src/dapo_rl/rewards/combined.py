"""Several reward functions combined into a weighted sum, as in TRL."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.errors import UserError
from dapo_rl.rewards.custom import Calls, CustomVerifier, curve_name, wait_for
from dapo_rl.rewards.logbook import limited, with_metrics
from dapo_rl.rewards.trainer_state import AT_START, RewardState
from dapo_rl.rewards.validation import fault_of_score, limit_of, trait, verify
from dapo_rl.types import MOST_LOGGED, Loggable, Prompt, RewardPart, Trajectory, Verdict, Verifier


class CombinedVerifier:
    """The weighted sum of the scores of several verifiers.

    The first verifier that applies to a sample decides whether it is correct. A user function that returns None does
    not apply, and adds nothing. One failed verdict fails the sample. Asynchronous functions run at the same time.
    """

    takes_state = True

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        limits: Sequence[float | None] | None = None,
        timeout_s: float = 0.0,
        *,
        partial: bool = False,
    ) -> None:
        """`partial`: that no verifier applies to a sample is no error, as there are others elsewhere.

        `names` are those of the curves. `limits` are the time limits of individual verifiers, by default their
        attribute `timeout_s`; `timeout_s` is the limit of all verifiers without one together."""
        if not verifiers:
            raise UserError("reward functions: the list is empty; give at least one")
        if len(verifiers) > MOST_LOGGED:
            raise UserError(f"reward functions: {len(verifiers)} are too many; the limit is {MOST_LOGGED}")
        self.verifiers = tuple(verifiers)
        self.weights = checked_weights(weights, len(verifiers))
        self.names = unique([curve_name(verifier) for verifier in verifiers] if names is None else names)
        self._limits = [limit_of(verifier) for verifier in verifiers] if limits is None else list(limits)
        self._others_s = timeout_s
        self._partial = partial
        self.needs_answer = any(trait(verifier, "needs_answer") for verifier in verifiers)
        self.per_sample = all(trait(verifier, "per_sample") for verifier in verifiers)
        self.text_only = all(trait(verifier, "text_only") for verifier in verifiers)

    @property
    def timeout_s(self) -> float | None:
        """The limit of a call, if a verifier has its own limit. Asynchronous verifiers run at the same time."""
        if all(limit is None for limit in self._limits):
            return None
        pairs = list(zip(self.verifiers, self._limits, strict=True))
        together = max((limit for verifier, limit in pairs if limit and _is_async(verifier)), default=0.0)
        one_by_one = sum(limit for verifier, limit in pairs if limit and not _is_async(verifier))
        return together + one_by_one + (self._others_s if None in self._limits else 0.0)

    def warm_up(self) -> None:
        for verifier in self.verifiers:
            if hasattr(verifier, "warm_up"):
                verifier.warm_up()

    def check(self, prompts: Sequence[Prompt]) -> None:
        for verifier in self.verifiers:
            if hasattr(verifier, "check"):
                verifier.check(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory], state: RewardState = AT_START) -> list[Verdict]:
        begun = [v.begin(prompt, samples, state) if isinstance(v, CustomVerifier) else None for v in self.verifiers]
        calls = [each for each in begun if each is not None]
        wait_for(calls)
        opinions: list[Sequence[Verdict | None]] = [
            verify(verifier, prompt, samples, state=state) if each is None else each.verdicts()
            for verifier, each in zip(self.verifiers, begun, strict=True)
        ]
        verdicts = [
            self._combine(of_sample, _extra(calls, index))
            for index, of_sample in enumerate(zip(*opinions, strict=True))
        ]
        own = [verdict.metrics for opinion in opinions for verdict in opinion if verdict is not None]
        return with_metrics(verdicts, [*(each.log.metrics for each in calls), *own])

    def _combine(self, verdicts: Sequence[Verdict | None], extra: dict[str, Loggable]) -> Verdict:
        named = zip(self.names, self.weights, verdicts, strict=True)
        applied = [(name, weight, verdict) for name, weight, verdict in named if verdict is not None]
        if not applied:
            if self._partial:
                return Verdict(0.0, False, "wrong", extra=limited(extra))
            return Verdict(0.0, False, "error", detail="every reward function returned None", extra=limited(extra))
        own = {name: value for _, _, verdict in applied for name, value in verdict.extra.items()}
        return weighted_sum(applied, limited(own | extra))


def weighted_sum(applied: Sequence[tuple[str, float, Verdict]], extra: Mapping[str, Loggable]) -> Verdict:
    """Of the verdicts that apply, with their names and weights: the first decides whether the sample is correct, and
    one that failed fails it."""
    for _, _, verdict in applied:
        if verdict.failed:
            return replace(verdict, parts=(), extra=extra, metrics={})
    first = applied[0][2]
    score = sum(weight * verdict.score for _, weight, verdict in applied)
    parts = tuple(RewardPart(name, float(verdict.score), weight) for name, weight, verdict in applied)
    return Verdict(score, first.correct, first.status, first.answer, first.detail, parts, extra)


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number where one is taken: length, length_2."""
    taken: list[str] = []
    for name in names:
        candidates = (name if n == 1 else f"{name}_{n}" for n in itertools.count(1))
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return tuple(taken)


def checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise UserError(f"reward weights: {len(weights)} for {count} reward functions; give one for each")
    for weight in weights:
        if fault := fault_of_weight(weight):
            raise UserError(f"reward weights: {fault}")
    if not any(weights):
        raise UserError("reward weights: all are 0, so every reward is 0; give one that is not")
    return tuple(float(weight) for weight in weights)


def fault_of_weight(weight: Any) -> str:
    if not isinstance(weight, int | float) or isinstance(weight, bool):
        return f"{shown(weight)} is not a number"
    return fault_of_score(weight)


def _is_async(verifier: Verifier) -> bool:
    return isinstance(verifier, CustomVerifier) and verifier.is_async


def _extra(calls: Sequence[Calls], index: int) -> dict[str, Loggable]:
    return {name: value for each in calls for name, value in each.log.extra(index).items()}
