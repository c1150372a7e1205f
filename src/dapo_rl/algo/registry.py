"""The functions behind the names of `algo.loss` and `algo.advantage`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from dapo_rl.algo.advantage import group_advantages
from dapo_rl.algo.loss import policy_token_losses


class TokenLosses(Protocol):
    """Losses `[B, T]` of tokens; 0 where masked. How they become one number is the aggregation's."""

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
"""Advantages `[P, G]` of rewards `[P, G]`, given which samples count in a mean; none stands for all of them."""

LOSSES: dict[str, TokenLosses] = {"dapo": policy_token_losses}
ADVANTAGES: dict[str, Callable[..., Tensor]] = {"group": group_advantages}
"""Each takes `normalize`, `ddof`, `eps` and `mask` beside the rewards."""
