"""The filter of dynamic sampling: does a group carry a learning signal?"""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_sampling_filter(values: Tensor, eps: float = 1e-6) -> Tensor:
    """`[B, G] → bool [B]`; True keeps the group.

    For booleans (correctness): `0 < correct < G` (Eq. 11). For numbers: a range above `eps`. Pass correctness or raw
    scores, never rewards that include a length penalty: they differ in an all-wrong group with different lengths.
    """
    if values.dtype == torch.bool:
        correct_B = values.sum(-1)
        return (correct_B > 0) & (correct_B < values.shape[-1])
    values_BG = values.float()
    return (values_BG.amax(-1) - values_BG.amin(-1)) > eps
