"""Linear layers for inference: projections of one input in one product, float32 logits, prepacked weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.models.kernels.module_patterns import Change, FusedModule, Handed, agree, can_join, random_like

_ROWS = 128
"""The number of rows that prepacked weights are optimised for; any number works."""


class Join:
    """Linear layers with the same input, whose weights (and biases) are stored in one tensor."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.parameters: list[Tensor] = []
        self.weight = self._join([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else self._join([linear.bias for linear in linears])
        self.prepacked: Prepacked | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.prepacked is None else self.prepacked(x)

    def _join(self, parameters: Sequence[Tensor]) -> Tensor:
        joint = _already_joint(parameters)
        if joint is None:
            joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, piece in zip(parameters, joint.split(self.sizes), strict=True):
            parameter.data = piece
        self.parameters += parameters
        return joint


def _already_joint(parameters: Sequence[Tensor]) -> Tensor | None:
    """The joint tensor, if the same parameters were joined before: layers can share them."""
    first, place = parameters[0].data, parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.data_ptr() == place):
            return None
        place += parameter.numel() * parameter.element_size()
    rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class FusedQuery(FusedModule):
    """Computes keys and values too, and hands them to the other two projections."""

    fused: tuple[Join, tuple[Handed, Handed]]

    def forward(self, x: Tensor) -> Tensor:
        join, key_value = self.fused
        q: Tensor
        q, *others = join(x).split(join.sizes, dim=-1)
        for handed, result in zip(key_value, others, strict=True):
            handed.leave(x, result)
        return q


class FusedKeyOrValue(FusedModule):
    fused: Handed

    def forward(self, x: Tensor) -> Tensor:
        result = self.fused.take(x)
        return super().forward(x) if result is None else result


def fuse_projections(attention: Any, joins: list[Join]) -> list[Change] | None:
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    if not can_join(linears):
        return None
    x = random_like((1, 3, linears[0].in_features), linears[0].weight)
    expected = [linear(x) for linear in linears]
    join = Join(linears)
    joins.append(join)
    if not all(agree(got, y) for got, y in zip(join(x).split(join.sizes, dim=-1), expected, strict=True)):
        return None
    key_value = (Handed(), Handed())
    others = [Change(linear, FusedKeyOrValue, handed) for linear, handed in zip(linears[1:], key_value, strict=True)]
    return [Change(linears[0], FusedQuery, (join, key_value)), *others]


class FusedHead(FusedModule):
    """Keeps the logits in float32: rounding them to bfloat16 would change probabilities by about a percent."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return _wide_logits(x, self.weight)


def _wide_logits(x: Tensor, weight: Tensor) -> Tensor:
    flat = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32)
    logits: Tensor = flat.unflatten(0, x.shape[:-1])
    return logits


def fuse_head(model: Any) -> list[Change] | None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    if head.weight.dtype == torch.float32 or not head.weight.is_cuda:
        return []
    x = random_like((1, 3, head.in_features), head.weight)
    return [Change(head, FusedHead)] if agree(_wide_logits(x, head.weight).to(x.dtype), head(x)) else None


class Prepacked:
    """`F.linear` with a weight in the layout of the CPU's matrix unit; call `refresh` after the weight changes.

    A matrix unit (AMX) reads weights in tiles. By default torch reorders the weight at every product, which for few
    rows takes longer than the product itself.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.refresh()

    def refresh(self) -> None:
        self._ordered = _in_order(self._weight.detach())

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply(x, self._ordered, self._bias)


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


def _in_order(weight: Tensor) -> Tensor:
    ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return ordered


def _multiply(x: Tensor, ordered: Tensor, bias: Tensor | None) -> Tensor:
    attributes: list[Any] = []
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, ordered, bias, "none", attributes, "")
    return product


class PrepackedLinear(FusedModule):
    fused: Prepacked

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


def prepack_linears(model: Any, joins: Sequence[Join], prepacked: list[Prepacked]) -> list[Change]:
    """Prepacks the joint projections and all other linear layers."""
    for join in joins:
        join.prepacked = Prepacked(join.weight, join.bias)
        prepacked.append(join.prepacked)
    joined = {id(parameter) for join in joins for parameter in join.parameters}
    changes = list[Change]()
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in joined:
            prepacked.append(Prepacked(module.weight, module.bias))
            changes.append(Change(module, PrepackedLinear, prepacked[-1]))
    return changes
