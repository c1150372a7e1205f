"""Pacing: how many groups may be started, so that none is older than `max_staleness` weight versions when it is trained
on.

A group is ahead of a new one if it was drawn before it and can still be trained on from now on: it is in the batch of
this step, waits for its turn, or has no verdict yet. Groups are admitted in the order drawn, and a step trains on n of
them. A new group is therefore trained on in time if fewer than (max_staleness + 1) · n of those ahead of it are good.
How many will be is not known before their verdicts: it is the sum of independent variables, one per group, that are 1
with the recent acceptance rate. A new group is started if the mean of that sum plus three standard deviations is small
enough.

If more groups turn out good than that, a step has more than n of them: it does not end before the groups that would be
too old in the next step are judged, and it trains on all good ones among them. A group begun at version v is therefore
trained on at version v + max_staleness at the latest, whatever the verdicts are and however long its samples take. None
is dropped for its age, so the lengths trained on follow the lengths sampled.

With `max_staleness: 0` every group ahead counts as good, so that a step starts only as many groups as it can train on:
all of them are judged within the step, and nothing is left over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapo_rl.config import SamplingSettings

MARGIN = 3.0
"""Standard deviations. A normal variable exceeds three of them once in 740 times."""


@dataclass(slots=True)
class Ahead:
    """The groups ahead of a new one."""

    good: int
    """In the batch, or waiting for their turn."""
    unjudged: int = 0
    mean: float = 0.0
    """Of the number of good groups among those without a verdict."""
    variance: float = 0.0

    def add(self, chance: float) -> None:
        """Adds a group without a verdict that is good with this probability."""
        self.unjudged += 1
        self.mean += chance
        self.variance += chance * (1 - chance)

    @property
    def most(self) -> float:
        """The number of good groups, with a margin."""
        return self.good + min(self.unjudged, self.mean + MARGIN * math.sqrt(self.variance))


def may_start(settings: SamplingSettings, n: int, ahead: Ahead) -> bool:
    """Whether a group may be started behind these. Without `surplus: carry` there is no limit, because no group
    outlives its step."""
    if settings.surplus != "carry":
        return True
    most = ahead.most if settings.max_staleness else ahead.good + ahead.unjudged
    return most < (settings.max_staleness + 1) * n
