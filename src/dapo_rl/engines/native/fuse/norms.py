"""RMS norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dapo_rl.engines.native.fuse.change import FusedModule
from dapo_rl.engines.native.fuse.compare import agree, random_like
from dapo_rl.engines.native.fuse.handed import Handed
from dapo_rl.engines.native.fuse.ops import Ops


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, which a layer can compute along with its residual sum and leave `ahead`."""

    ops: Ops
    weight: Tensor
    eps: float
    plus_one: bool
    """Whether the weight is an offset from 1, as Gemma's is."""
    ahead: Handed = field(default_factory=Handed)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.plus_one)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.plus_one)


class FusedNorm(FusedModule):
    fused: Norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.fused
        ready = norm.ahead.take(x)
        if ready is None and x.dtype == norm.weight.dtype:
            ready = norm(x)
        return super().forward(x) if ready is None else ready


def recognise_norm(module: Any, ops: Ops) -> Norm | None:
    """Recognises Llama's and Gemma's norm by their output for a random weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    x = random_like((1, 3, len(module.weight)), module.weight)
    weight = random_like(module.weight.shape, module.weight, seed=1)
    expected = torch.func.functional_call(module, {"weight": weight}, (x,))
    for plus_one in (False, True):
        if agree(ops.rms_norm(x, weight, eps, plus_one), expected):
            return Norm(ops, module.weight, eps, plus_one)
    return None
