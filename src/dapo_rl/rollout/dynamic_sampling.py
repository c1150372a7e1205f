"""The filter of dynamic sampling: which groups are kept, and why others are dropped.

`sampling.metric: auto` recognises graded scores.

Scores are right-or-wrong as long as all correct samples have one score and all others have one, and graded from the
first that differs. Up to then a group that is all right or all wrong has no spread, so no earlier group was dropped
that the spread would have kept.

If the score is a sum of several rewards, those that add at most half as much as the largest are minor: a group is kept
if its scores differ without them. Otherwise a small reward, for example for brevity, would keep every group, and
dividing by the group's standard deviation would make it as large as the others.

With rewards that are normalised each on its own (`algo.advantage: gdpo`) none is minor: a group is kept if any of them
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pydantic import Field

from dapo_rl.base.quote import describe
from dapo_rl.base.saved import Finite, Saved
from dapo_rl.choices import Masking
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.objectives.advantages import dynamic_sampling_filter
from dapo_rl.outcomes import Outcome
from dapo_rl.types import Drops, Group, Verdict

GroupFilter = Callable[[Group], bool]

SAME = 1e-6
"""Scores that differ by less are the same, as in the filter."""


class Observed(NamedTuple):
    """The scores of one reward function so far."""

    lowest: Finite
    highest: Finite
    weight: Finite


class Grading(Saved):
    """Statistics of the scores so far."""

    correct: Finite | None = None
    """The score of the first correct sample."""
    wrong: Finite | None = None
    """The score of the first sample that is not correct."""
    graded: bool = False
    rewards: dict[str, Observed] = Field(default_factory=dict)
    """The functions that the scores are sums of."""

    def observe(self, group: Group) -> str | None:
        """Returns a note for the user when the scores turn out to be graded, or a reward to be minor."""
        before = self._minor()
        for verdict in group.verdicts:
            for part in () if verdict.failed else verdict.parts:
                seen = self.rewards.get(part.name, Observed(part.score, part.score, part.weight))
                self.rewards[part.name] = Observed(
                    min(seen.lowest, part.score), max(seen.highest, part.score), part.weight
                )
        if len(self.rewards) > 1:
            return None if self._minor() == before else self._about_minor()
        return None if self.graded else self._observe_scores(group)

    def _observe_scores(self, group: Group) -> str | None:
        for verdict in group.verdicts:
            if verdict.failed:
                continue
            first = self.correct if verdict.correct else self.wrong
            if first is not None and abs(verdict.score - first) > SAME:
                self.graded = True
                return (
                    f"the scores are graded ({first:g} and {verdict.score:g} are both {_word(verdict)}): from now on "
                    "groups are kept if their scores differ; sampling.metric=correct keeps those with right and wrong "
                    "samples instead"
                )
            if first is None and verdict.correct:
                self.correct = verdict.score
            elif first is None:
                self.wrong = verdict.score
        return None

    def _about_minor(self) -> str:
        minor = self._minor()
        if not minor:
            return "every reward counts: groups are kept if the sums of their rewards differ"
        names = f"{' and '.join(sorted(minor))} {'adds' if len(minor) == 1 else 'add'}"
        others = " or ".join(name for name, seen in self.rewards.items() if name not in minor and seen.weight)
        return (
            f"{names} at most half as much as {others}: groups are kept if {others} differs; "
            "sampling.metric=score compares the sums of all rewards"
        )

    def drops(self, verdicts: Sequence[Verdict]) -> Outcome | None:
        """Why a group without failed verdicts carries no signal, by the scores seen so far; None if it does."""
        if len(self.rewards) > 1:
            return None if self._differs(verdicts) else alike(verdicts) or "no_spread"
        return same_score(verdicts) if self.graded else alike(verdicts)

    def _minor(self) -> frozenset[str]:
        """The rewards that add at most half as much as the largest. A range below 1 counts as 1."""
        added = {name: abs(seen.weight) * max(seen.highest - seen.lowest, 1.0) for name, seen in self.rewards.items()}
        return frozenset(name for name, most in added.items() if most <= max(added.values()) / 2)

    def _differs(self, verdicts: Sequence[Verdict]) -> bool:
        """Whether the scores differ without the minor rewards, or at all where no other applies."""
        minor = self._minor()
        if all(part.name in minor for verdict in verdicts for part in verdict.parts):
            return has_spread(verdicts)
        sums = [sum(p.weight * p.score for p in verdict.parts if p.name not in minor) for verdict in verdicts]
        return max(sums) - min(sums) > SAME


def alike(verdicts: Sequence[Verdict]) -> Outcome | None:
    """`all_correct` or `all_wrong`; None for a group with right and wrong samples."""
    correct = [verdict.correct for verdict in verdicts]
    if dynamic_sampling_filter(torch.tensor([correct])).item():
        return None
    return "all_correct" if correct[0] else "all_wrong"


def drops_alike(settings: SamplingSettings) -> Drops | None:
    """Whether correctness alone drops a group, so that its rewards are of no use; None if they may be."""
    if not settings.dynamic or settings.metric != "correct" or settings.on_cap == "fill":
        return None
    return lambda verdicts: alike(verdicts) is not None


def no_reward_differs(verdicts: Sequence[Verdict]) -> Outcome | None:
    """Why no reward function has a signal in a group; None if one has."""
    return None if has_spread(verdicts, decoupled=True) else alike(verdicts) or "no_spread"


def same_score(verdicts: Sequence[Verdict]) -> Outcome | None:
    """`no_spread`; None for a group whose scores differ."""
    return None if has_spread(verdicts) else "no_spread"


def has_spread(verdicts: Sequence[Verdict], decoupled: bool = False) -> bool:
    """Whether the scores of a group differ, or, if they are `decoupled`, those of one of the reward functions."""
    if decoupled and any(verdict.parts for verdict in verdicts):
        scores_of: dict[str, list[float]] = {}
        for part in (part for verdict in verdicts for part in verdict.parts if part.weight):
            scores_of.setdefault(part.name, []).append(part.score)
        return any(max(scores) - min(scores) > SAME for scores in scores_of.values())
    scores = torch.tensor([[verdict.score for verdict in verdicts]])
    return bool(dynamic_sampling_filter(scores, SAME).item())


def _word(verdict: Verdict) -> str:
    return "correct" if verdict.correct else "wrong"


def outcome_of(
    group: Group,
    settings: SamplingSettings,
    keep: GroupFilter | None,
    grading: Grading,
    masking: Masking = "none",
    decoupled: bool = False,
) -> Outcome:
    """Decides by correctness or raw scores, before any length penalty. Where the metric is `auto`, `grading` decides,
    or, if rewards are `decoupled`, whether any of them differs."""
    if any(sample.scalars.get("env_failed") for sample in group.samples):
        return "environment_error"
    if any(verdict.failed for verdict in group.verdicts):
        return "verifier_error"
    if settings.dynamic:
        by_metric = {"auto": no_reward_differs if decoupled else grading.drops, "correct": alike, "score": same_score}
        why_dropped = by_metric[settings.metric]
        if (outcome := why_dropped(group.verdicts)) is not None:
            return outcome
        left = [v for s, v in group.judged if not s.truncated]
        # With truncated samples in the baseline, even equal samples have an advantage over them.
        if masking != "none" and (not left or (masking == "baseline" and why_dropped(left) is not None)):
            return "truncated"
    return "kept" if keep is None or _passes(keep, group) else "filtered"


def _passes(keep: GroupFilter, group: Group) -> bool:
    try:
        return bool(keep(group))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # includes SystemExit: sys.exit(0) in a filter must not end the run as a success
        raise UserError(
            f"sampling.filter: {describe(error)}, on the group of prompt {group.prompt.id}; "
            "it is called with a group (prompt, samples, verdicts) and returns whether to keep it"
        ) from error
