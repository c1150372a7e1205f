"""What `algo.loss` and `algo.advantage` are, as functions; `dapo_rl.family` has those with a name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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


class Advantages(Protocol):
    """Computes advantages `[P, G]` from rewards `[P, G]`, a mask of the samples in the baseline (None: all), and the
    numbers of tokens that the policy wrote (None: 1 each)."""

    def __call__(self, rewards: Tensor, mask: Tensor | None, lengths: Tensor | None = None) -> Tensor: ...
