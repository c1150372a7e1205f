"""Linear layers: projections of one input in one product, float32 logits, prepacked weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.engines.native.fuse.change import Change, FusedModule
from dapo_rl.engines.native.fuse.compare import agree, random_like
from dapo_rl.engines.native.fuse.handed import Handed
from dapo_rl.engines.native.prepack import Prepacked


class Join:
    """Linear layers with the same input, whose weights (and biases) are stored in one tensor."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.weight = self._join([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else self._join([linear.bias for linear in linears])
        self.prepacked: Prepacked | None = None

    @staticmethod
    def possible(linears: Sequence[Any]) -> bool:
        first = linears[0]
        return all(
            type(linear) is nn.Linear
            and linear.in_features == first.in_features
            and (linear.bias is None) == (first.bias is None)
            and (linear.weight.dtype, linear.weight.device) == (first.weight.dtype, first.weight.device)
            for linear in linears
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self.prepacked is None else self.prepacked(x)

    def intact(self) -> bool:
        return all(parameter.data_ptr() == piece.data_ptr() for parameter, piece in self._pairs)

    def has(self, parameter: Tensor) -> bool:
        return any(parameter is mine for mine, _ in self._pairs)

    def _join(self, parameters: Sequence[Tensor]) -> Tensor:
        joint = _already_joint(parameters)
        if joint is None:
            joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, piece in zip(parameters, joint.split(self.sizes), strict=True):
            parameter.data = piece
            self._pairs.append((parameter, piece))
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
    if not Join.possible(linears):
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


class PrepackedLinear(FusedModule):
    fused: Prepacked

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


def prepack_linears(model: Any, joins: Sequence[Join], prepacked: list[Prepacked]) -> list[Change]:
    """Prepacks the joint projections and all other linear layers."""
    for join in joins:
        join.prepacked = Prepacked(join.weight, join.bias)
        prepacked.append(join.prepacked)
    changes = list[Change]()
    for module in model.modules():
        if type(module) is nn.Linear and not any(join.has(module.weight) for join in joins):
            prepacked.append(Prepacked(module.weight, module.bias))
            changes.append(Change(module, PrepackedLinear, prepacked[-1]))
    return changes
