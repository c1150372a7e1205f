"""The sample that a rank computes when it has none left, to take part in the collectives of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_rl.train.off_policy import SCALE
from dapo_rl.types import KEPT_IDS, Trajectory

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


def placeholder_like(samples: Sequence[Trajectory], gather: Callable[[Any], list[Any]]) -> Trajectory:
    """A placeholder with zeros in all columns of the samples, for a function that may take any of them. `gather` gives
    the value of each rank: this one may have no samples."""
    own = samples[0].columns if samples else {}
    more = own.keys() - PLACEHOLDER.columns.keys() - {KEPT_IDS}
    columns = {name: np.zeros((1, *own[name].shape[1:]), own[name].dtype) for name in more}
    return PLACEHOLDER.replace(**next((found for found in gather(columns) if found), {}))
