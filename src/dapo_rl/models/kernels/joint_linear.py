"""Linear layers with the same input as one product, with gradients of the weights in the weights' own type.

Autocast rounds the gradient of a float32 weight to bfloat16 and converts it back; here the product's sums are written
in float32. Shapes: T tokens, N inputs, M outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The concatenated results of the layers, computed in `dtype`; there is a bias for each weight, or none at all."""
    out: Tensor = _JointLinear.apply(x, dtype, len(weights), *weights, *biases)
    return out


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        weight_MN = _joined(weights, dtype)
        # Weights of this type are kept as they are: sharded ones are whole only while their layer computes.
        kept = weights if all(weight.dtype == dtype for weight in weights) else (weight_MN,)
        bias_M = torch.cat(biases).to(dtype) if biases else None
        x_TN = x.reshape(-1, x.shape[-1]).to(dtype)
        ctx.save_for_backward(x_TN, *kept)
        ctx.sizes, ctx.of_x = [len(weight) for weight in weights], (x.shape, x.dtype)
        ctx.types = [parameter.dtype for parameter in parameters]
        return F.linear(x_TN, weight_MN, bias_M).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TN, *kept = ctx.saved_tensors
        weight_MN = _joined(kept, x_TN.dtype)
        count = len(ctx.sizes)
        wants_x, _, _, *wants = ctx.needs_input_grad
        grad_TM = grad.reshape(-1, len(weight_MN))
        grad_x = (grad_TM @ weight_MN).view(ctx.of_x[0]).to(ctx.of_x[1]) if wants_x else None
        parts: list[Tensor | None] = [None] * len(wants)
        if any(wants[:count]):
            parts[:count] = _product(grad_TM.T, x_TN, ctx.types[0]).split(ctx.sizes)
        if any(wants[count:]):
            parts[count:] = grad_TM.sum(0, dtype=torch.float32).to(ctx.types[count]).split(ctx.sizes)
        return grad_x, None, None, *(part if wanted else None for part, wanted in zip(parts, wants, strict=True))


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights as one, in `dtype`; a single one of that type is not copied."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    joined_MN = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    for part, weight in zip(joined_MN.split([len(weight) for weight in weights]), weights, strict=True):
        part.copy_(weight)
    return joined_MN


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and dtype == torch.float32 != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
