"""Recognises graded scores, for `sampling.metric: auto`.

Scores are right-or-wrong as long as all correct samples have one score and all others have one, and graded from the
first that differs. Up to then a group that is all right or all wrong has no spread, so no earlier group was dropped
that the spread would have kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dapo_rl.algo import dynamic_sampling_filter
from dapo_rl.types import Group, Verdict

SAME = 1e-6
"""Scores that differ by less are the same, as in the filter."""


@dataclass(slots=True)
class Grading:
    """What the scores so far look like. Saved with the sampler."""

    correct: float | None = None
    """The score of the first correct sample."""
    wrong: float | None = None
    """The score of the first sample that is not correct."""
    graded: bool = False

    def observe(self, group: Group) -> str | None:
        """Returns a note for the user when the scores turn out to be graded."""
        if self.graded:
            return None
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


def has_spread(verdicts: Sequence[Verdict]) -> bool:
    """Whether the scores of a group differ."""
    scores = torch.tensor([[verdict.score for verdict in verdicts]])
    return bool(dynamic_sampling_filter(scores, SAME).item())


def _word(verdict: Verdict) -> str:
    return "correct" if verdict.correct else "wrong"
