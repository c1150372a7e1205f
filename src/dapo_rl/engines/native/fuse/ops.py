"""The operations that fused modules call."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor


class Ops(Protocol):
    """What `kernels` provides; tests pass their own."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]: ...

    def gated_linear(
        self, x: Tensor, weight_2IN: Tensor, bias: Tensor | None, kind: Literal["silu", "gelu_tanh"]
    ) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...
