"""The sample that a rank computes when it has none left, to take part in the collectives of the others."""

from __future__ import annotations

from dapo_rl.train.off_policy import SCALE
from dapo_rl.types import Trajectory

PLACEHOLDER = Trajectory(
    [0],
    mask=False,
    prompt_ids=[0],
    scalars={"group": -1, SCALE: 1.0},
    advantages=0.0,
    ref_logps=0.0,
    entropy_mask=False,
    cov_mask=False,
)
