"""MLPs with a gate: one product for gate and input, and one kernel for the activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.rollout.native.fuse.change import Change, FusedModule
from dapo_rl.rollout.native.fuse.compare import agree, random_like
from dapo_rl.rollout.native.fuse.linears import Join
from dapo_rl.rollout.native.fuse.ops import Ops

Gated = Callable[[Tensor], Tensor]
"""Computes `act(gate) * up` from the joint product."""


class FusedMLP(FusedModule):
    fused: tuple[Join, Gated]
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        join, gated = self.fused
        out: Tensor = self.down_proj(gated(join(x)))
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
    gated = _gated(act, ops)
    return [Change(mlp, FusedMLP, (join, gated))] if agree(mlp.down_proj(gated(join(x))), expected) else None


class FusedJointMLP(FusedModule):
    """Its weight is joint as it was loaded."""

    fused: Gated
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.fused(self.gate_up_proj(hidden_states)))
        return out


def fuse_joint_mlp(mlp: Any, ops: Ops) -> list[Change] | None:
    act = getattr(mlp, "activation_fn", None) or getattr(mlp, "act_fn", None)
    if type(mlp.gate_up_proj) is not nn.Linear or act is None:
        return None
    gated = _gated(act, ops)
    x = random_like((1, 3, mlp.gate_up_proj.in_features), mlp.gate_up_proj.weight)
    return [Change(mlp, FusedJointMLP, gated)] if agree(mlp.down_proj(gated(mlp.gate_up_proj(x))), mlp(x)) else None


def _gated(act: Callable[[Tensor], Tensor], ops: Ops | None) -> Gated:
    x = torch.linspace(-8, 8, 257)
    kinds: dict[Literal["silu", "gelu_tanh"], Tensor] = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    try:
        y = act(x)
    except RuntimeError:  # An activation with parameters on another device.
        kinds = {}
    for kind, expected in kinds.items():
        if ops is not None and torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
            return lambda gate_up: ops.gated(gate_up, kind)

    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    return plain
