"""Linear layers with the same input as one product, and MLPs with a fused gated activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.models.fused.check import ROUNDING, Forward, GradientCheck, is_untouched
from dapo_rl.models.fused.gated import GatedKind, gated_product
from dapo_rl.models.fused.linear import joint_linear


def can_join(linears: Sequence[Any]) -> bool:
    """Plain linear layers; adapters wrap theirs."""
    first = linears[0]
    return all(
        type(linear) is nn.Linear
        and is_untouched(linear)
        and linear.in_features == first.in_features
        and (linear.bias is None) == (first.bias is None)
        and linear.weight.dtype == first.weight.dtype
        for linear in linears
    )


def _joined(x: Tensor, linears: Sequence[Any], dtype: torch.dtype) -> Tensor:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return joint_linear(x, [linear.weight for linear in linears], biases, dtype)


class JointProjection:
    """Linear layers as one product: the first computes it and keeps the results of the others, such as keys and
    values, until they are called with the same input."""

    def __init__(self, linears: Sequence[Any], dtype: torch.dtype) -> None:
        self._linears, self._dtype = linears, dtype
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forwards(self) -> list[Forward]:
        return [self._first, *(partial(self._later, i) for i in range(1, len(self._linears)))]

    def forget(self) -> None:
        """A result that nobody took, after an error, would keep the whole graph in memory."""
        self._kept.clear()

    def _first(self, x: Tensor) -> Tensor:
        sizes = [linear.out_features for linear in self._linears]
        results: tuple[Tensor, ...] = _joined(x, self._linears, self._dtype).split(sizes, dim=-1)
        first, *others = results
        self._kept = {i: (x, other) for i, other in enumerate(others, start=1)}
        return first

    def _later(self, i: int, x: Tensor) -> Any:
        of, result = self._kept.pop(i, (None, None))
        if of is x and result is not None:
            return result
        linear = self._linears[i]
        return F.linear(x, linear.weight, linear.bias)


def fused_mlp(mlp: Any, check: GradientCheck) -> Forward | None:
    act = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    kind = None if act is None else _kind(act)
    if kind is None:
        return None

    def with_one_product(x: Tensor) -> Any:
        return mlp.down_proj(gated_product(_joined(x, (mlp.gate_proj, mlp.up_proj), check.dtype), None, kind))

    def separate(x: Tensor) -> Any:
        return mlp.down_proj(gated_product(mlp.gate_proj(x), mlp.up_proj(x), kind))

    def joint(hidden_states: Tensor) -> Any:
        return mlp.down_proj(gated_product(mlp.gate_up_proj(hidden_states), None, kind))

    is_joint = "gate_up_proj" in mlp._modules
    forward = joint if is_joint else with_one_product if can_join((mlp.gate_proj, mlp.up_proj)) else separate
    width = getattr(mlp.gate_up_proj if is_joint else mlp.gate_proj, "in_features", 0)
    return forward if check.agree(forward, mlp.forward, [check.random(1, 5, width)], ROUNDING) else None


def _kind(act: Callable[[Tensor], Tensor]) -> GatedKind | None:
    x = torch.linspace(-8, 8, 257)
    kinds: dict[GatedKind, Tensor] = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    try:
        y = act(x)
    except RuntimeError:  # an activation with parameters on another device
        return None
    return next((kind for kind, expected in kinds.items() if torch.allclose(y, expected, rtol=1e-5, atol=1e-5)), None)
