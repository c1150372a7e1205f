"""The element-wise operations between matrix products: norms, gated activations, the rotary embedding.

Each kernel runs on the current stream with fixed block sizes and reads no device values on the host, so a CUDA graph
can capture it. Shapes: T tokens, H query heads and K key-value heads of dimension D, N hidden size.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMS norm over the last dimension, rounded where Llama's module rounds; `plus_one` is for Gemma's norm, which
    multiplies by 1 + weight."""
    return _rms_norm(x, None, weight, eps, plus_one)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and the sum itself."""
    return _rms_norm(x, residual.contiguous(), weight, eps, plus_one)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N = x.shape[-1]
    assert weight.shape == (N,)
    assert weight.dtype == x.dtype
    assert weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    x_3 = _rows_in_two_strides(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    rows = out.numel() // N
    BLOCK = next_power_of_2(N)
    ROWS = max(1, 1024 // BLOCK)
    _rms_norm_kernel[(cdiv(rows, ROWS),)](
        x_3, x if residual is None else residual, weight, out, total,
        rows, x_3.shape[1], N, x_3.stride(0), x_3.stride(1), float(eps),
        ADD=residual is not None, PLUS_ONE=plus_one, ROWS=ROWS, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 8,
    )  # fmt: skip
    return out, total


def _rows_in_two_strides(x: Tensor) -> Tensor:
    """`x` as `[outer, inner, N]`, usually tokens × heads; the rows of a slice of a joint projection are not
    contiguous."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x
    rows = x.shape[-2] if x.dim() > 1 else 1
    try:
        x_3 = x.view(-1, rows, x.shape[-1])
    except RuntimeError:
        x_3 = x.contiguous().view(-1, rows, x.shape[-1])
    return x_3 if x_3.stride(-1) == 1 else x_3.contiguous()


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, rows, inner, N, x_outer, x_inner, eps,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    tile = (row < rows)[:, None] & (n < N)[None, :]
    there = (row * N)[:, None] + n[None, :]
    start = (row // inner) * x_outer + (row % inner) * x_inner
    x_RN = tl.load(x + start[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
    if ADD:
        x_RN += tl.load(residual + there, mask=tile, other=0.0).to(tl.float32)
        sum_RN = x_RN.to(dtype)
        tl.store(total + there, sum_RN, mask=tile)
        x_RN = sum_RN.to(tl.float32)
    w_N = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    mean_R = tl.sum(x_RN * x_RN, axis=1) / N
    norm_RN = x_RN * tl.rsqrt(mean_R + eps)[:, None]
    out_RN = norm_RN * (1.0 + w_N)[None, :] if PLUS_ONE else norm_RN.to(dtype).to(tl.float32) * w_N[None, :]
    tl.store(out + there, out_RN.to(dtype), mask=tile)


Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, kind: Activation) -> Tensor:
    """`act(gate) * up` of the two halves of the last dimension, the activation rounded before the product."""
    inner = gate_up.shape[-1] // 2
    gate_up_T2I = gate_up.reshape(-1, 2 * inner)
    assert gate_up_T2I.stride(1) == 1
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(len(gate_up_T2I), cdiv(inner, 1024))](
        gate_up_T2I, out, gate_up_T2I.stride(0), inner, SILU=kind == "silu", BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(gate_up, out, stride, inner, SILU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    g = tl.load(gate_up + t * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + inner + i, mask=inside, other=0.0).to(tl.float32)
    # The tanh form of GELU is also a product with a logistic function: 0.5·(1 + tanh y) = 1 / (1 + exp(−2y)).
    slope = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    act = g / (1.0 + tl.exp(-slope))
    dtype = out.dtype.element_ty
    tl.store(out + t * inner + i, (act.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` in one launch, for `[1, H, T, D]` and `[1, K, T, D]`, stored as `[T, H, D]`.

    cos and sin are `[1, T, W]`; dimensions beyond W are copied unchanged.
    """
    _, H, T, D = q.shape
    K, W = k.shape[1], cos.shape[-1]
    assert q.shape[0] == 1
    assert cos.shape == sin.shape == (1, T, W)
    q_out, k_out = q.new_empty(1, T, H, D), k.new_empty(1, T, K, D)
    for x in (q, k, cos, sin):
        assert x.stride(-1) == 1
        assert x.dtype == q.dtype
    _rotary_kernel[(T,)](
        q, k, cos, sin, q_out, k_out, q.stride(2), q.stride(1), k.stride(2), k.stride(1), cos.stride(1), sin.stride(1),
        H=H, HP=next_power_of_2(H), K=K, KP=next_power_of_2(K),
        D=D, HALF=W // 2, HALF_P=next_power_of_2(W // 2), REST_P=next_power_of_2(D - W), num_warps=4,
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_t, q_h, k_t, k_h, cos_t, sin_t,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    _turn(q + t * q_t, q_out + t * H * D, cos + t * cos_t, sin + t * sin_t, q_h, H, HP, D, HALF, HALF_P, REST_P)
    _turn(k + t * k_t, k_out + t * K * D, cos + t * cos_t, sin + t * sin_t, k_h, K, KP, D, HALF, HALF_P, REST_P)


@triton.jit
def _turn(
    x, out, cos, sin, stride, H: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token; each product is rounded before the sum, as in the module."""
    dtype = out.dtype.element_ty
    h = tl.arange(0, HP)
    i = tl.arange(0, HALF_P)
    tile = (h < H)[:, None] & (i < HALF)[None, :]
    there = h[:, None] * stride + i[None, :]
    into = h[:, None] * D + i[None, :]
    x_1 = tl.load(x + there, mask=tile, other=0.0).to(tl.float32)
    x_2 = tl.load(x + there + HALF, mask=tile, other=0.0).to(tl.float32)
    c_1 = tl.load(cos + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    c_2 = tl.load(cos + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s_1 = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s_2 = tl.load(sin + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    turned_1 = (x_1 * c_1).to(dtype).to(tl.float32) - (x_2 * s_1).to(dtype).to(tl.float32)
    turned_2 = (x_2 * c_2).to(dtype).to(tl.float32) + (x_1 * s_2).to(dtype).to(tl.float32)
    tl.store(out + into, turned_1.to(dtype), mask=tile)
    tl.store(out + into + HALF, turned_2.to(dtype), mask=tile)
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_P)
        rest = (h < H)[:, None] & (j < D)[None, :]
        passed = tl.load(x + h[:, None] * stride + j[None, :], mask=rest, other=0.0)
        tl.store(out + h[:, None] * D + j[None, :], passed, mask=rest)
