"""`act(gate) · up` of a gated MLP. The backward pass computes the activation again instead of keeping it.

Shapes: T tokens, I inner size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

GatedKind = Literal["silu", "gelu_tanh"]

_BLOCK = 1024


def gated_product(gate: Tensor, up: Tensor | None, kind: GatedKind) -> Tensor:
    """In float32, rounded once to the type of `gate`; without `up`, `gate` is both of them in one tensor."""
    out: Tensor = _GatedProduct.apply(gate, up, kind)
    return out


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: GatedKind) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        gate_TI, up_TI = _halves(gate, up)
        T, inner = gate_TI.shape
        out = torch.empty(*gate.shape[:-1], inner, dtype=gate.dtype, device=gate.device)
        _product_kernel[(T, cdiv(inner, _BLOCK))](
            gate_TI, up_TI, out, inner, gate_TI.stride(0), up_TI.stride(0), SILU=kind == "silu", BLOCK=_BLOCK
        )
        return out

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


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _rows_of(gate)
    gate_TI, up_TI = rows.chunk(2, dim=1) if up is None else (rows, _rows_of(up))
    return gate_TI, up_TI


def _rows_of(x: Tensor) -> Tensor:
    """`[T, I]` with contiguous rows, which may have a larger stride between them."""
    x_TI = x.reshape(-1, x.shape[-1])
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


@triton.jit
def _product_kernel(gate, up, out, inner, gate_t, up_t, SILU: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    g_I = tl.load(gate + t * gate_t + i, mask=inside, other=0.0).to(tl.float32)
    u_I = tl.load(up + t * up_t + i, mask=inside, other=0.0).to(tl.float32)
    share_I, _ = _share(g_I, SILU)
    tl.store(out + t * inner + i, (g_I * share_I * u_I).to(out.dtype.element_ty), mask=inside)


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
