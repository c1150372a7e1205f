"""The rotary embedding of queries and keys, which attention modules look up as a global of their modeling file.

The trained module reads the same global, so it stays: the engine's attention modules get a copy of their `forward` with
globals of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dapo_rl.engines.native.fuse.change import Change, FusedModule
from dapo_rl.engines.native.fuse.compare import agree, random_like
from dapo_rl.engines.native.fuse.ops import Ops
from dapo_rl.models.own_globals import with_global

_NAME = "apply_rotary_pos_emb"


def fuse_rotary(attentions: Sequence[Any], ops: Ops) -> list[Change] | None:
    """The attention modules are of one class."""
    plain_forward = type(attentions[0]).forward
    plain = getattr(inspect.unwrap(plain_forward), "__globals__", {}).get(_NAME)
    if plain is None:
        return []
    rotary = _rotary(plain, attentions[0], ops)
    forward = None if rotary is None else with_global(plain_forward, _NAME, rotary)
    if forward is None:
        return None
    into = type("FusedRotary", (FusedModule,), {"forward": forward})
    return [Change(attention, into) for attention in attentions]


def _rotary(plain: Callable[..., Any], attention: Any, ops: Ops) -> Callable[..., Any] | None:
    like = next(attention.parameters())
    D = attention.head_dim
    q, k = (random_like((1, 3, heads, D), like, seed).transpose(1, 2) for seed, heads in enumerate((4, 2)))

    def agrees(width: int) -> bool:
        cos, sin = (random_like((1, 3, width), like, seed) for seed in (2, 3))
        try:
            expected = plain(q, k, cos, sin)
        except (RuntimeError, TypeError):
            return False
        got = ops.rotary(q, k, cos, sin)
        return all(agree(a, b) for a, b in zip(got, expected, strict=True))

    if not agrees(D):
        return None
    partial = agrees(D // 4 * 2)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
        usual = q.dim() == 4 and cos.shape == (1, q.shape[2], cos.shape[-1]) and q.dtype == k.dtype == cos.dtype
        whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if arguments or named or not usual or len(q) != 1 or not (whole or partial):
            return plain(q, k, cos, sin, *arguments, **named)
        return ops.rotary(q, k, cos, sin)

    return rotary
