"""Attention modules with a fused rotary embedding."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from dapo_rl.models.fused.check import ROUNDING, Forward, GradientCheck
from dapo_rl.models.fused.rotary import rotated
from dapo_rl.models.own_globals import with_global

ROTARY = "apply_rotary_pos_emb"


class RotaryReplacements:
    """Fused rotary embeddings in the place of those that modeling files define."""

    def __init__(self, check: GradientCheck) -> None:
        self._check = check
        self._known: dict[Any, Forward | None] = {}

    def inside(self, attention: Any, code: FunctionType) -> Forward | None:
        """The attention's own code with a fused rotary embedding."""
        plain, width = code.__globals__.get(ROTARY), getattr(attention, "head_dim", None)
        if plain is None or not isinstance(width, int):
            return None
        if (plain, width) not in self._known:
            self._known[plain, width] = self._rotary(plain, width)
        fused = self._known[plain, width]
        own = None if fused is None else with_global(code, ROTARY, fused)
        return None if own is None else MethodType(own, attention)

    def _rotary(self, plain: Forward, width: int) -> Forward | None:
        check = self._check
        q, k = (
            check.random(1, 5, heads, width, seed=heads, dtype=check.dtype).transpose(1, 2).detach().requires_grad_()
            for heads in (4, 2)
        )

        def agrees(part: int) -> bool:
            cos, sin = (check.random(1, 5, part, seed=seed).detach() for seed in (2, 3))
            return check.agree(
                lambda q, k: rotated(q, k, cos, sin, check.dtype),
                lambda q, k: plain(q, k, cos, sin),
                [q, k],
                ROUNDING,
            )

        if not agrees(width):
            return None
        takes_part = agrees(width // 4 * 2)

        def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
            one_row = q.dim() == 4 and len(q) == 1 and cos.shape == (1, q.shape[2], cos.shape[-1])
            whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
            if arguments or named or not one_row or not (whole or takes_part):
                return plain(q, k, cos, sin, *arguments, **named)
            return rotated(q, k, cos, sin, check.dtype)

        return rotary
