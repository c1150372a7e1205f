"""Reads rows of a tensor; the gradient of a row is the sum over its reads, in float32 and in a fixed order.

Shapes: T rows, R reads of them, N elements of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, next_power_of_2


def read_rows(x_TN: Tensor, indices_R: Tensor, order_R: Tensor, starts_T: Tensor) -> Tensor:
    """`x[indices]`. The reads of row t are `order[starts[t]:starts[t + 1]]`."""
    read_RN: Tensor = _Read.apply(x_TN, indices_R, order_R, starts_T)
    return read_RN


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TN: Tensor, indices_R: Tensor, order_R: Tensor, starts_T: Tensor) -> Tensor:
        ctx.save_for_backward(order_R, starts_T)
        return x_TN.index_select(0, indices_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        return sum_reads(grad_RN, *ctx.saved_tensors), None, None, None


def sum_reads(grad_RN: Tensor, order_R: Tensor, starts_T: Tensor) -> Tensor:
    T, N = len(starts_T) - 1, grad_RN.shape[1]
    grad_RN = grad_RN.contiguous()
    out_TN = grad_RN.new_empty(T, N)
    BLOCK = min(next_power_of_2(N), 1024)
    _sum_kernel[(T, cdiv(N, BLOCK))](grad_RN, order_R, starts_T, out_TN, N, BLOCK=BLOCK, num_warps=max(BLOCK // 256, 1))
    return out_TN


@triton.jit
def _sum_kernel(grad, order, starts, out, N, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    total_N = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(starts + t), tl.load(starts + t + 1)):
        row = tl.load(order + i).to(tl.int64)
        total_N += tl.load(grad + row * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * N + n, total_N.to(out.dtype.element_ty), mask=inside)
