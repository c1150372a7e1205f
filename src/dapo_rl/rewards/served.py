"""Verifiers that run in the run's own process, once, instead of in its workers: reward models and judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dapo_rl.config import RewardSettings
from dapo_rl.rewards.combined import CombinedVerifier, checked_weights, weighted_sum
from dapo_rl.rewards.custom import threshold_of
from dapo_rl.rewards.logbook import limited, with_metrics
from dapo_rl.rewards.validation import trait
from dapo_rl.types import Drops, Pending, Prompt, RewardPart, Trajectory, Verdict, Verifier

AGREE_WITH = "agree_with."
"""The names of rules that a judge is compared with; they are not part of the reward."""


class Served:
    """A verifier that must exist once. What a run tells it, it may ignore."""

    settings: RewardSettings
    name = ""
    """Of its curve."""
    needs_answer = False
    agree_with: str | None = None
    """A verifier whose verdicts are compared with its own."""

    def submit(self, prompt: Prompt, samples: Sequence[Trajectory]) -> Pending:
        raise NotImplementedError

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return list(self.submit(prompt, samples).result())

    def scored(self, score: float) -> Verdict:
        """Correct if the score is above `reward.threshold`."""
        correct = score > threshold_of(self.settings)
        parts = (RewardPart(self.name, score),)
        return Verdict(score, correct, "correct" if correct else "wrong", parts=parts)

    def begin(self, directory: Path) -> None:
        """A run begins, or continues, in its directory."""

    def compare(self, verdict: Verdict, rule: Verdict) -> None:
        """Takes the verdict of the rule that it is compared with."""

    def release_memory(self) -> None:
        """Frees memory of the GPU until the next call."""

    def close(self) -> None: ...

    @property
    def stopped(self) -> str:
        """Why the run has to stop; empty if it does not."""
        return ""


class AsScore:
    """The verdicts of a rule with 1 as the score of a correct sample and 0 of others; it does not apply to those that
    it fails on."""

    def __init__(self, rule: Verifier) -> None:
        self._rule = rule
        self.needs_answer = trait(rule, "needs_answer")
        self.per_sample, self.text_only = trait(rule, "per_sample"), trait(rule, "text_only")

    def warm_up(self) -> None:
        if own := getattr(self._rule, "warm_up", None):
            own()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if own := getattr(self._rule, "check", None):
            own(prompts)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return [
            Verdict(-1.0 if each.failed else float(each.correct), False, "wrong")
            for each in self._rule(prompt, samples)
        ]


class MixedVerifier:
    """The weighted sum of verifiers, some of which are served. It judges as `CombinedVerifier` does: `local` has those
    for worker processes, with the rules of judges last."""

    def __init__(
        self,
        verifiers: Sequence[Verifier | Served],
        weights: Sequence[float] | None,
        names: Sequence[str],
        limits: Sequence[float | None],
        settings: RewardSettings,
        rules: Mapping[str, Verifier],
    ) -> None:
        """`rules` are those of served verifiers that `agree_with` one, by the names of the verifiers."""
        self.names = tuple(names)
        self.weights = dict(zip(names, checked_weights(weights, len(names)), strict=True))
        pairs = list(zip(names, verifiers, limits, strict=True))
        self.served: dict[str, Served] = {name: each for name, each, _ in pairs if isinstance(each, Served)}
        local = [(name, each, limit) for name, each, limit in pairs if not isinstance(each, Served)]
        self.only_rules = not local
        local += [(AGREE_WITH + name, AsScore(rule), None) for name, rule in rules.items()]
        self.local: CombinedVerifier | None = None
        if local:
            of_workers, checked, their_limits = zip(*local, strict=True)
            ones = [1.0] * len(local)
            self.local = CombinedVerifier(checked, ones, of_workers, their_limits, settings.timeout_s, partial=True)
        own = any(each.needs_answer for each in self.served.values())
        self.needs_answer = own or (self.local is not None and self.local.needs_answer)

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        """Here and now, without worker processes."""
        local = None if self.local is None else self.local(prompt, samples)
        return self.joined(local, {name: each(prompt, samples) for name, each in self.served.items()}, len(samples))

    def check(self, prompts: Sequence[Prompt]) -> None:
        if self.local is not None:
            self.local.check(prompts)

    def is_dropped(self, local: Future[list[Verdict]] | None, drops: Drops | None) -> bool:
        """Whether the workers' verdicts have arrived, decide correctness, and already drop the group."""
        if drops is None or local is None or not local.done() or local.cancelled() or local.exception() is not None:
            return False
        verdicts, first = local.result(), self.names[0]
        return all(any(part.name == first for part in verdict.parts) for verdict in verdicts) and drops(verdicts)

    def joined(
        self, local: Sequence[Verdict] | None, served: Mapping[str, Sequence[Verdict]], count: int
    ) -> list[Verdict]:
        """The verdicts on samples, from those of the workers and of the served verifiers that gave any."""
        of_workers = [None] * count if local is None else list(local)
        verdicts = [
            self._joined(own, dict(zip(served, others, strict=True)))
            for own, *others in zip(of_workers, *served.values(), strict=True)
        ]
        metrics = [verdict.metrics for opinion in (local or (), *served.values()) for verdict in opinion]
        return with_metrics(verdicts, metrics)

    def _joined(self, local: Verdict | None, served: Mapping[str, Verdict]) -> Verdict:
        parts = {} if local is None else {part.name: part.score for part in local.parts}
        for name, verdict in served.items():
            rule = parts.pop(AGREE_WITH + name, -1.0)
            if rule >= 0 and not verdict.failed:
                self.served[name].compare(verdict, Verdict(rule, rule > 0, "correct" if rule > 0 else "wrong"))
        opinions = dict(served)
        if local is not None:  # which has the correctness of its first part
            opinions |= {name: replace(local, score=score) for name, score in parts.items()}
        applied = [(name, self.weights[name], opinions[name]) for name in self.names if name in opinions]
        if local is not None and local.failed and not self.only_rules:
            applied.insert(0, ("", 0.0, local))
        extra = {key: value for each in (local, *served.values()) if each for key, value in each.extra.items()}
        return weighted_sum(applied, limited(extra))


@dataclass(frozen=True, slots=True)
class MixedTicket:
    """The verdicts of workers and of served verifiers, being computed."""

    verifier: MixedVerifier
    local: Pending | None
    served: Sequence[Pending]
    count: int

    @property
    def futures(self) -> Sequence[Future[Any]]:
        """What to wait for before `result`."""
        pending = [each for each in (self.local, *self.served) if each is not None]
        return [f for p in pending for f in ([p] if isinstance(p, Future) else getattr(p, "futures", ()))]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def result(self) -> list[Verdict]:
        local = None if self.local is None else self.local.result()
        answers = zip(self.verifier.served, (pending.result() for pending in self.served), strict=True)
        # A reward model gives a dropped group no verdicts.
        return self.verifier.joined(local, {name: verdicts for name, verdicts in answers if verdicts}, self.count)
