"""The functions behind the names of `algo.loss` and `algo.advantage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dapo_rl.algo.advantage import group_advantages
from dapo_rl.algo.loss import policy_token_losses


class TokenLosses(Protocol):
    """Computes token losses `[B, T]`, 0 where masked, which the aggregation then reduces to one number."""

    def __call__(
        self,
        new_logps: Tensor,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        clip_ratio_c: float | None,
    ) -> Tensor: ...


Advantages = Callable[[Tensor, Tensor | None], Tensor]
"""Computes advantages `[P, G]` from rewards `[P, G]` and a mask of the samples in the baseline (None: all)."""

LOSSES: dict[str, TokenLosses] = {"dapo": policy_token_losses}
ADVANTAGES: dict[str, Callable[..., Tensor]] = {"group": group_advantages}
"""Each takes `normalize`, `ddof`, `eps` and `mask` in addition to the rewards."""
