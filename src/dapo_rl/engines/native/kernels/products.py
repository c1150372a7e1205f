"""The product of few rows with a gate and an up projection, and the gated activation of its result, in one kernel.

A product of few rows takes as long as reading the weights. This kernel reads them faster than cuBLAS does, up to
`MOST_ROWS`, and the activation needs no kernel of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dapo_rl.engines.native.kernels.elementwise import Activation, gated

MOST_ROWS = 64
TILE = 64
"""Columns of the gate, and of the up projection, that a program computes."""
CHUNK = 64
"""Inputs that a program reads at a time."""
WARPS, STAGES = 4, 3


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


@triton.jit
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
    g = gate_IT.to(dtype).to(tl.float32)
    # The tanh form of GELU is also a product with a logistic function: 0.5·(1 + tanh y) = 1 / (1 + exp(−2y)).
    slope = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    act = (g / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)
    result = (act * up_IT.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + t[None, :].to(tl.int64) * inner + i[:, None], result, mask=real_I & real_T)
