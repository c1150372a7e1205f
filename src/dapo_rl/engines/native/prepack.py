"""Weights prepacked in the CPU's matrix layout, kept between steps.

A matrix unit (AMX) reads weights in tiles. By default torch reorders the weight at every product, which for few rows
takes longer than the product itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_ROWS = 128
"""The number of rows that the layout is optimised for; any number works."""


def can_prepack(weight: Tensor) -> bool:
    """Whether torch can prepack this weight here, with the same products."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=torch.float32).view(2, -1).to(weight.dtype)
    some = weight.detach()[:64].contiguous()
    try:
        ours, expected = _multiply(x, _in_order(some), None), F.linear(x, some)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(ours.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.float().abs().max()))


class Prepacked:
    """`F.linear` with a prepacked weight; call `refresh` after the weight changes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.refresh()

    def refresh(self) -> None:
        self._ordered = _in_order(self._weight.detach())

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply(x, self._ordered, self._bias)


def _in_order(weight: Tensor) -> Tensor:
    ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return ordered


def _multiply(x: Tensor, ordered: Tensor, bias: Tensor | None) -> Tensor:
    attributes: list[Any] = []
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, bias, "none", attributes, "")
    return product
