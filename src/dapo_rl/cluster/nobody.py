"""The sample of a rank that has none left, while others have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_rl.train.off_policy import SCALE
from dapo_rl.types import KEPT_IDS, Trajectory

NOBODY = Trajectory(
    [0],
    mask=False,
    prompt_ids=[0],
    scalars={"group": -1, SCALE: 1.0},
    advantages=0.0,
    ref_logps=0.0,
    entropy_mask=False,
    cov_mask=False,
)
"""What a rank computes when it has no sample left and others have: it takes part in their collectives."""


def nobody_like(samples: Sequence[Trajectory], gather: Callable[[Any], list[Any]]) -> Trajectory:
    """With zeros in all columns that the samples have, for a function that may take any of them. `gather` gives the
    value of each rank: this one may have no samples."""
    own = samples[0].columns if samples else {}
    more = own.keys() - NOBODY.columns.keys() - {KEPT_IDS}
    columns = {name: np.zeros((1, *own[name].shape[1:]), own[name].dtype) for name in more}
    return NOBODY.replace(**next((found for found in gather(columns) if found), {}))
