"""The rotary embedding of queries and keys, in one launch for both: forward for decoding, with gradients for updates.

Shapes: T tokens, H query heads, K key heads, D the width of a head, W ≤ D the part of it that is rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import next_power_of_2


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` for `[1, H, T, D]` and `[1, K, T, D]`, stored as `[T, H, D]`; products are rounded before
    they are added, as in the module. cos and sin are `[1, T, W]`; dimensions beyond W are copied unchanged."""
    assert q.shape[0] == 1
    assert cos.shape == sin.shape == (1, q.shape[2], cos.shape[-1])
    for x in (q, k, cos, sin):
        assert x.stride(-1) == 1
        assert x.dtype == q.dtype
    return _turned(q, k, cos, sin, (q.dtype, q.dtype), back=False, as_module=True)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotates `[1, H, T, D]` and `[1, K, T, D]` by `[1, T, W]` in float32 and rounds once to `dtype`.

    The results are stored as `[T, H, D]`, as attention reads them. cos and sin get no gradient.
    """
    q_out, k_out = _Rotated.apply(q, k, cos, sin, dtype)
    return q_out, k_out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.types = (q.dtype, k.dtype)
        return _turned(q, k, cos, sin, (dtype, dtype), back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_turned(grad_q, grad_k, cos, sin, ctx.types, back=True), None, None, None


def _turned(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, types: Sequence[torch.dtype], back: bool, as_module: bool = False
) -> tuple[Tensor, Tensor]:
    _, H, T, D = q.shape
    K, W = k.shape[1], cos.shape[-1]
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    q_out, k_out = (
        torch.empty(1, T, heads, D, dtype=dtype, device=q.device) for heads, dtype in zip((H, K), types, strict=True)
    )
    _turn_kernel[(T,)](
        q, k, cos, sin, q_out, k_out, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), sin.stride(1),
        BACK=back, AS_MODULE=as_module, H=H, HP=next_power_of_2(H), K=K, KP=next_power_of_2(K), D=D, HALF=W // 2,
        HALF_P=next_power_of_2(W // 2), REST_P=next_power_of_2(D - W) if D > W else 0,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit
def _turn_kernel(
    q, k, cos, sin, q_out, k_out, q_t, q_h, k_t, k_h, cos_t, sin_t,
    BACK: tl.constexpr, AS_MODULE: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cos += t * cos_t
    sin += t * sin_t
    _turn_heads(q + t * q_t, q_out + t * H * D, cos, sin, q_h, BACK, AS_MODULE, H, HP, D, HALF, HALF_P, REST_P)
    _turn_heads(k + t * k_t, k_out + t * K * D, cos, sin, k_h, BACK, AS_MODULE, K, KP, D, HALF, HALF_P, REST_P)


@triton.jit
def _turn_heads(
    x, out, cos, sin, x_h, BACK: tl.constexpr, AS_MODULE: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    """out₁ = x₁·cos₁ − x₂·sin₁ and out₂ = x₂·cos₂ + x₁·sin₂ for the two halves; backwards, its transpose."""
    dtype = out.dtype.element_ty
    h = tl.arange(0, HP)
    w = tl.arange(0, HALF_P)
    tile = (h < H)[:, None] & (w < HALF)[None, :]
    there = h[:, None] * x_h + w[None, :]
    here = h[:, None] * D + w[None, :]
    x_1 = tl.load(x + there, mask=tile, other=0.0).to(tl.float32)
    x_2 = tl.load(x + there + HALF, mask=tile, other=0.0).to(tl.float32)
    cos_1 = tl.load(cos + w, mask=w < HALF, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos + HALF + w, mask=w < HALF, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin + w, mask=w < HALF, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin + HALF + w, mask=w < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:
        out_1 = x_1 * cos_1 + x_2 * sin_2
        out_2 = x_2 * cos_2 - x_1 * sin_1
    elif AS_MODULE:
        out_1 = (x_1 * cos_1).to(dtype).to(tl.float32) - (x_2 * sin_1).to(dtype).to(tl.float32)
        out_2 = (x_2 * cos_2).to(dtype).to(tl.float32) + (x_1 * sin_2).to(dtype).to(tl.float32)
    else:
        out_1 = x_1 * cos_1 - x_2 * sin_1
        out_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(out + here, out_1.to(dtype), mask=tile)
    tl.store(out + here + HALF, out_2.to(dtype), mask=tile)
    if REST_P > 0:
        r = tl.arange(0, REST_P)
        rest = (h < H)[:, None] & (r < D - 2 * HALF)[None, :]
        x_R = tl.load(x + h[:, None] * x_h + 2 * HALF + r[None, :], mask=rest, other=0.0)
        tl.store(out + h[:, None] * D + 2 * HALF + r[None, :], x_R.to(dtype), mask=rest)
