"""Pacing: how many groups may be started, so that none is older than `max_staleness` weight versions when it is trained
on.

A group counts as ahead of a new one if it was drawn before it and can still be trained on from now on: it is in the
batch of this step, waits for its turn, or has no verdict yet. A new group is started only if fewer than
(max_staleness + 1) · n groups are ahead of it, where n is the number of groups that a step trains on. This bounds its
age, whatever the verdicts are and however long its samples take:

- Groups are admitted in the order drawn, and a group without a verdict holds up those behind it. A step that begins
  with fewer than n groups ahead of this one therefore ends only after this one was judged and, if it is good, admitted:
  the step waits for its oldest groups, and the weights do not change before.
- Any other step trains on n of the groups ahead. After `max_staleness` steps fewer than n are left; groups that are not
  kept only shorten the wait.

A group begun at version v is therefore trained on at version v + max_staleness at the latest. No finished group is
dropped for its age, so the lengths trained on follow the lengths sampled. With `max_staleness: 0` a step starts only as
many groups as it can train on: all of them are judged within the step, and nothing is left over.
"""

from __future__ import annotations

import math

from dapo_rl.config import SamplingSettings


def groups_to_start(settings: SamplingSettings, n: int, ahead: int) -> float:
    """The number of groups that may be started now with `ahead` groups ahead of them. Without `surplus: carry` there is
    no limit, because no group outlives its step."""
    return (settings.max_staleness + 1) * n - ahead if settings.surplus == "carry" else math.inf
