"""MLPs with a gate: one product for gate and input, and one kernel for the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.engines.native.fuse.change import Change, FusedModule
from dapo_rl.engines.native.fuse.compare import agree, random_like
from dapo_rl.engines.native.fuse.linears import Join
from dapo_rl.engines.native.fuse.ops import Ops

Kind = Literal["silu", "gelu_tanh"]
Gated = Callable[[Tensor], Tensor]
"""Computes `act(gate) * up` from the input."""


class FusedMLP(FusedModule):
    fused: Gated
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.fused(x))
        return out


def fuse_mlp(mlp: Any, ops: Ops | None, joins: list[Join]) -> list[Change] | None:
    linears = [mlp.gate_proj, mlp.up_proj]
    act = getattr(mlp, "act_fn", None)
    if not Join.possible(linears) or act is None:
        return None
    x = random_like((1, 3, mlp.gate_proj.in_features), mlp.gate_proj.weight)
    expected = mlp(x)
    join = Join(linears)
    joins.append(join)
    gated = _gated(join, act, ops)
    return [Change(mlp, FusedMLP, gated)] if agree(mlp.down_proj(gated(x)), expected) else None


def _gated(join: Join, act: Callable[[Tensor], Tensor], ops: Ops | None) -> Gated:
    kind = None if ops is None else _kind(act)
    if ops is not None and kind is not None:
        return lambda x: ops.gated_linear(x, join.weight, join.bias, kind)

    def plain(x: Tensor) -> Tensor:
        gate, up = join(x).chunk(2, dim=-1)
        return act(gate) * up

    return plain


class FusedJointMLP(FusedModule):
    """Its weight is joint as it was loaded."""

    fused: tuple[Ops, Kind]
    gate_up_proj: nn.Linear
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        ops, kind = self.fused
        joint = self.gate_up_proj
        out: Tensor = self.down_proj(ops.gated_linear(hidden_states, joint.weight, joint.bias, kind))
        return out


def fuse_joint_mlp(mlp: Any, ops: Ops) -> list[Change] | None:
    act = getattr(mlp, "activation_fn", None) or getattr(mlp, "act_fn", None)
    joint = mlp.gate_up_proj
    if type(joint) is not nn.Linear or act is None or (kind := _kind(act)) is None:
        return None
    x = random_like((1, 3, joint.in_features), joint.weight)
    got = mlp.down_proj(ops.gated_linear(x, joint.weight, joint.bias, kind))
    return [Change(mlp, FusedJointMLP, (ops, kind))] if agree(got, mlp(x)) else None


def _kind(act: Callable[[Tensor], Tensor]) -> Kind | None:
    """Which of the activations that the kernel computes it is."""
    x = torch.linspace(-8, 8, 257)
    kinds: dict[Kind, Tensor] = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    try:
        y = act(x)
    except RuntimeError:  # An activation with parameters on another device.
        return None
    return next((kind for kind, expected in kinds.items() if torch.allclose(y, expected, rtol=1e-5, atol=1e-5)), None)
