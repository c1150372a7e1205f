"""RMS norm of a residual stream, with the sum that it reads: forward for decoding, forward and backward for updates.

The norm is computed in float32. For decoding the result is rounded where the module rounds it; in updates the sum has
the wider type of its two terms (float32 under autocast), and the result is rounded once. Shapes: T rows, N elements of
a row, P programs of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, next_power_of_2


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """RMS norm over the last dimension, rounded where Llama's module rounds; `plus_one` is for Gemma's norm, which
    multiplies by 1 + weight. A CUDA graph can capture it."""
    return _decoded(x, None, weight, eps, plus_one)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and the sum itself."""
    return _decoded(x, residual.contiguous(), weight, eps, plus_one)


def _decoded(
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
    T = out.numel() // N
    BLOCK = next_power_of_2(N)
    ROWS = max(1, 1024 // BLOCK)
    _forward_kernel[(cdiv(T, ROWS),)](
        x_3, x if residual is None else residual, weight, out, total, out,
        T, x_3.shape[1], N, x_3.stride(0), x_3.stride(1), N, float(eps),
        ADD=residual is not None, PLUS_ONE=plus_one, AS_MODULE=True, ROWS=ROWS, BLOCK=BLOCK,
        num_warps=4 if BLOCK <= 2048 else 8,
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


def add_and_norm(
    residual: Tensor, added: Tensor | None, weight_N: Tensor, eps: float, plus_one: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`residual + added` (or `residual`), and its norm times the weight (`plus_one`: 1 + weight, as in Gemma).

    The sum goes on from here, so that the gradients of both results are added in this function's backward pass.
    """
    total, normed = _AddAndNorm.apply(residual, added, weight_N, eps, plus_one, dtype)
    return total, normed


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        added: Tensor | None,
        weight_N: Tensor,
        eps: float,
        plus_one: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        N = len(weight_N)
        residual_TN = residual.reshape(-1, N)
        added_TN = None if added is None else added.reshape(-1, N)
        wide = residual.dtype if added is None else torch.promote_types(residual.dtype, added.dtype)
        T = len(residual_TN)
        normed = torch.empty(residual.shape, dtype=dtype, device=residual.device)
        total = residual if added is None else torch.empty(residual.shape, dtype=wide, device=residual.device)
        scale_T = torch.empty(T, dtype=torch.float32, device=residual.device)
        BLOCK, ROWS, warps = _tile(N)
        _forward_kernel[(cdiv(T, ROWS),)](
            residual_TN, residual_TN if added_TN is None else added_TN, weight_N, normed, total, scale_T,
            T, 1, N, residual_TN.stride(0), 0, 0 if added_TN is None else added_TN.stride(0), eps,
            ADD=added is not None, PLUS_ONE=plus_one, AS_MODULE=False, ROWS=ROWS, BLOCK=BLOCK, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(total, weight_N, scale_T)
        ctx.plus_one, ctx.types = plus_one, (residual.dtype, None if added is None else added.dtype)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight_N, scale_T = ctx.saved_tensors
        residual_type, added_type = ctx.types
        if grad_normed is None:
            parts = [None if grad_total is None or t is None else grad_total.to(t) for t in ctx.types]
            return *parts, None, None, None, None
        N = len(weight_N)
        total_TN, grad_normed_TN = (x.reshape(-1, N) for x in (total, grad_normed))
        grad_total_TN = grad_normed_TN if grad_total is None else grad_total.reshape(-1, N)
        grad_residual = torch.empty(total.shape, dtype=residual_type, device=total.device)
        narrow = added_type is not None and added_type != residual_type
        grad_added = torch.empty(total.shape, dtype=added_type, device=total.device) if narrow else grad_residual
        BLOCK, ROWS, warps = _tile(N)
        T = len(total_TN)
        P = min(cdiv(T, ROWS), _programs(total.device))
        parts_PN = torch.empty(P, N, dtype=torch.float32, device=total.device)
        _backward_kernel[(P,)](
            total_TN, weight_N, scale_T, grad_total_TN, grad_normed_TN, grad_residual, grad_added, parts_PN,
            T, N, P, total_TN.stride(0), grad_total_TN.stride(0), grad_normed_TN.stride(0),
            HAS_TOTAL=grad_total is not None, TWO=narrow, PLUS_ONE=ctx.plus_one,
            ROWS=ROWS, BLOCK=BLOCK, num_warps=warps,
        )  # fmt: skip
        grad_weight_N = parts_PN.sum(0).to(weight_N.dtype) if ctx.needs_input_grad[2] else None
        return grad_residual, None if added_type is None else grad_added, grad_weight_N, None, None, None


def _tile(N: int) -> tuple[int, int, int]:
    """Columns and rows that a program handles at a time, and its warps: about 16 elements per thread."""
    BLOCK = next_power_of_2(N)
    return BLOCK, max(1, 2048 // BLOCK), min(max(BLOCK // 512, 4), 16)


def _programs(device: torch.device) -> int:
    """Enough to keep every multiprocessor busy, few enough that their partial sums are small."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x, added, weight, normed, total, scale, T, inner, N, x_outer, x_inner, added_t, eps,
    ADD: tl.constexpr, PLUS_ONE: tl.constexpr, AS_MODULE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row t of `x` is element t % inner of its outer row t // inner. `AS_MODULE` rounds before the product with the
    weight, as Llama's module does, and keeps no scales for a backward pass."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    tile = (t < T)[:, None] & (n < N)[None, :]
    out = (t * N)[:, None] + n[None, :]
    start = (t // inner) * x_outer + (t % inner) * x_inner
    x_TN = tl.load(x + start[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
    if ADD:
        x_TN += tl.load(added + (t * added_t)[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
        sum_TN = x_TN.to(total.dtype.element_ty)
        tl.store(total + out, sum_TN, mask=tile)
        x_TN = sum_TN.to(tl.float32)
    w_N = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w_N += 1.0
    scale_T = tl.rsqrt(tl.sum(x_TN * x_TN, axis=1) / N + eps)
    y_TN = x_TN * scale_T[:, None]
    if AS_MODULE:
        if not PLUS_ONE:
            y_TN = y_TN.to(normed.dtype.element_ty).to(tl.float32)
    else:
        tl.store(scale + t, scale_T, mask=t < T)
    tl.store(normed + out, (y_TN * w_N[None, :]).to(normed.dtype.element_ty), mask=tile)


@triton.jit(do_not_specialize=["T", "P"])
def _backward_kernel(
    total, weight, scale, grad_total, grad_normed, grad_residual, grad_added, parts,
    T, N, P, total_t, grad_total_t, grad_normed_t,
    HAS_TOTAL: tl.constexpr, TWO: tl.constexpr, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With x̂ = x · scale and h = grad_normed · weight: grad x = scale · (h − x̂ · mean(h · x̂)), and the gradient of the
    weight is the sum of grad_normed · x̂ over all rows."""
    p = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    w_N = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w_N += 1.0
    grad_w_N = tl.zeros([BLOCK], tl.float32)
    for first in range(p * ROWS, T, P * ROWS):
        t = first + tl.arange(0, ROWS).to(tl.int64)
        tile = (t < T)[:, None] & (n < N)[None, :]
        x_TN = tl.load(total + (t * total_t)[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
        g_TN = tl.load(grad_normed + (t * grad_normed_t)[:, None] + n[None, :], mask=tile, other=0.0).to(tl.float32)
        scale_T = tl.load(scale + t, mask=t < T, other=0.0)
        x_TN *= scale_T[:, None]
        grad_w_N += tl.sum(g_TN * x_TN, axis=0)
        h_TN = g_TN * w_N[None, :]
        mean_T = tl.sum(h_TN * x_TN, axis=1) / N
        d_TN = scale_T[:, None] * (h_TN - x_TN * mean_T[:, None])
        if HAS_TOTAL:
            above = grad_total + (t * grad_total_t)[:, None] + n[None, :]
            d_TN += tl.load(above, mask=tile, other=0.0).to(tl.float32)
        out = (t * N)[:, None] + n[None, :]
        tl.store(grad_residual + out, d_TN.to(grad_residual.dtype.element_ty), mask=tile)
        if TWO:
            tl.store(grad_added + out, d_TN.to(grad_added.dtype.element_ty), mask=tile)
    tl.store(parts + p.to(tl.int64) * N + n, grad_w_N, mask=n < N)
