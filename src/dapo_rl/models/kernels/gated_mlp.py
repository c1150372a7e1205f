"""`act(gate) · up` of a gated MLP: forward for decoding, with gradients for updates.

For decoding, the activation is rounded before the product, as in the module. For few rows one kernel computes the
matrix product too: it takes as long as reading the weights, and the kernel reads them faster than cuBLAS does. In
updates, the result is rounded once, and the backward pass computes the activation again instead of keeping it.
Shapes: T tokens, I inner size, N inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, next_power_of_2

from dapo_rl.models.kernels.module_patterns import Activation

_BLOCK = 1024
MOST_ROWS = 64
"""Rows up to which one kernel computes the matrix product and the activation."""
TILE = 64
"""Columns of the gate, and of the up projection, that a program of it computes."""
CHUNK = 64
"""Inputs that a program reads at a time."""
WARPS, STAGES = 4, 3


def gated(gate_up: Tensor, kind: Activation) -> Tensor:
    """`act(gate) * up` of the two halves of the last dimension, the activation rounded before the product."""
    return _product(gate_up, None, kind, as_module=True)


def gated_linear(x: Tensor, weight_2IN: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """`act(gate) * up`, for the gate and the up projection of `x` by a joint weight. Rounds as separate kernels do."""
    few = x.numel() <= MOST_ROWS * x.shape[-1] and bias is None and x.dtype != torch.float32
    return _of_few_rows(x, weight_2IN, kind) if few else gated(F.linear(x, weight_2IN, bias), kind)


def _of_few_rows(x: Tensor, weight_2IN: Tensor, kind: Activation) -> Tensor:
    inner, N = weight_2IN.shape[0] // 2, weight_2IN.shape[1]
    x_TN = x.reshape(-1, N)
    assert weight_2IN.stride(1) == x_TN.stride(1) == 1
    out = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
    _gated_linear_kernel[(cdiv(inner, TILE),)](
        x_TN, weight_2IN, out, len(x_TN), inner, N, x_TN.stride(0), weight_2IN.stride(0), SILU=kind == "silu",
        ROWS=max(16, next_power_of_2(len(x_TN))), TILE=TILE, CHUNK=CHUNK, EVEN=N % CHUNK == 0,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def gated_product(gate: Tensor, up: Tensor | None, kind: Activation) -> Tensor:
    """In float32, rounded once to the type of `gate`; without `up`, `gate` is both of them in one tensor."""
    out: Tensor = _GatedProduct.apply(gate, up, kind)
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _product(gate, up, kind, as_module=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gate_TI, up_TI = _halves(gate, up)
        grad_TI = _rows_of(grad)
        T, inner = gate_TI.shape
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        grad_gate_TI, grad_up_TI = _halves(grad_gate, grad_up)
        _gradient_kernel[(T, cdiv(inner, _BLOCK))](
            gate_TI, up_TI, grad_TI, grad_gate_TI, grad_up_TI, inner,
            gate_TI.stride(0), up_TI.stride(0), grad_TI.stride(0), grad_gate_TI.stride(0), grad_up_TI.stride(0),
            SILU=ctx.kind == "silu", BLOCK=_BLOCK,
        )  # fmt: skip
        return grad_gate, grad_up, None


def _product(gate: Tensor, up: Tensor | None, kind: Activation, as_module: bool) -> Tensor:
    gate_TI, up_TI = _halves(gate, up)
    T, inner = gate_TI.shape
    out = torch.empty(*gate.shape[:-1], inner, dtype=gate.dtype, device=gate.device)
    _product_kernel[(T, cdiv(inner, _BLOCK))](
        gate_TI, up_TI, out, inner, gate_TI.stride(0), up_TI.stride(0),
        SILU=kind == "silu", AS_MODULE=as_module, BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _rows_of(gate)
    gate_TI, up_TI = rows.chunk(2, dim=1) if up is None else (rows, _rows_of(up))
    return gate_TI, up_TI


def _rows_of(x: Tensor) -> Tensor:
    """`[T, I]` with contiguous rows, which may have a larger stride between them."""
    x_TI = x.reshape(-1, x.shape[-1])
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


@triton.jit
def _product_kernel(
    gate, up, out, inner, gate_t, up_t, SILU: tl.constexpr, AS_MODULE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    g_I = tl.load(gate + t * gate_t + i, mask=inside, other=0.0).to(tl.float32)
    u_I = tl.load(up + t * up_t + i, mask=inside, other=0.0).to(tl.float32)
    if AS_MODULE:
        product_I = _activated(g_I, out.dtype.element_ty, SILU) * u_I
    else:
        share_I, _ = _share(g_I, SILU)
        product_I = g_I * share_I * u_I
    tl.store(out + t * inner + i, product_I.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_kernel(
    gate, up, grad, grad_gate, grad_up, inner, gate_t, up_t, grad_t, grad_gate_t, grad_up_t,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    g_I = tl.load(gate + t * gate_t + i, mask=inside, other=0.0).to(tl.float32)
    u_I = tl.load(up + t * up_t + i, mask=inside, other=0.0).to(tl.float32)
    d_I = tl.load(grad + t * grad_t + i, mask=inside, other=0.0).to(tl.float32)
    share_I, slope_I = _share(g_I, SILU)
    d_gate_I = d_I * u_I * (share_I + g_I * slope_I * share_I * (1.0 - share_I))
    tl.store(grad_gate + t * grad_gate_t + i, d_gate_I.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + t * grad_up_t + i, (d_I * g_I * share_I).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _share(g_I, SILU: tl.constexpr):
    """σ(s) and ds/dg for an activation g · σ(s). GELU in its tanh form is one: 0.5 · (1 + tanh y) = σ(2y)."""
    if SILU:
        s_I = g_I
        slope_I = tl.full(g_I.shape, 1.0, tl.float32)
    else:
        s_I = 1.5957691216057308 * (g_I + 0.044715 * g_I * g_I * g_I)
        slope_I = 1.5957691216057308 * (1.0 + 0.134145 * g_I * g_I)
    return 1.0 / (1.0 + tl.exp(-s_I)), slope_I


@triton.jit
def _activated(g, dtype: tl.constexpr, SILU: tl.constexpr):
    """The activation, rounded to `dtype`."""
    slope = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    return (g / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _gated_linear_kernel(
    x, weight, out, rows, inner, N, x_t, weight_i,
    SILU: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    t = tl.arange(0, ROWS)
    n = tl.arange(0, CHUNK)
    real_I = (i < inner)[:, None]
    real_T = (t < rows)[None, :]
    # The weights are the left factor: tensor cores take no fewer than 64 rows there, and as few as 8 columns.
    gate = weight + i[:, None].to(tl.int64) * weight_i
    up = gate + inner.to(tl.int64) * weight_i
    x_of_T = x + t[None, :].to(tl.int64) * x_t
    gate_IT = tl.zeros([TILE, ROWS], tl.float32)
    up_IT = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, N, CHUNK):
        here = start + n
        real = here < N if not EVEN else here >= 0
        x_NT = tl.load(x_of_T + here[:, None], mask=real_T & real[:, None], other=0.0)
        gate_IN = tl.load(gate + here[None, :], mask=real_I & real[None, :], other=0.0)
        up_IN = tl.load(up + here[None, :], mask=real_I & real[None, :], other=0.0)
        gate_IT = tl.dot(gate_IN, x_NT, gate_IT)
        up_IT = tl.dot(up_IN, x_NT, up_IT)
    dtype = out.dtype.element_ty
    act = _activated(gate_IT.to(dtype).to(tl.float32), dtype, SILU)
    result = (act * up_IT.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + t[None, :].to(tl.int64) * inner + i[:, None], result, mask=real_I & real_T)
