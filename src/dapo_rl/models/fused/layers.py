"""Norms and decoder layers with fused forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dapo_rl.models.fused.check import ROUNDING, Forward, GradientCheck, forwards_replaced, is_untouched
from dapo_rl.models.fused.norm import add_and_norm


@dataclass(frozen=True, slots=True)
class TrainedNorm:
    module: Any
    eps: float
    plus_one: bool

    def after(self, residual: Tensor, added: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return add_and_norm(residual, added, self.module.weight, self.eps, self.plus_one, dtype)

    def alone(self, dtype: torch.dtype | None) -> Forward:
        """The module's forward pass; without a type, the result has the one that the module gives it."""

        def forward(hidden_states: Tensor) -> Tensor:
            of_x = hidden_states.dtype
            own = of_x if self.plus_one else torch.promote_types(of_x, self.module.weight.dtype)
            return self.after(hidden_states, None, dtype or own)[1]

        return forward


def trained_norm(module: Any, check: GradientCheck) -> TrainedNorm | None:
    """Recognises Llama's and Gemma's norm by their results for a random weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    inputs = [check.random(5, len(module.weight)), check.random(len(module.weight), seed=1)]

    def theirs(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    for plus_one in (False, True):

        def ours(x: Tensor, weight: Tensor, plus_one: bool = plus_one) -> Tensor:
            return add_and_norm(x, None, weight, eps, plus_one, torch.float32)[1]

        if check.agree(ours, theirs, inputs, 1e-4):
            return TrainedNorm(module, eps, plus_one)
    return None


def fused_layer(layer: Any, norms: Mapping[nn.Module, TrainedNorm], check: GradientCheck) -> Forward | None:
    """Fuses the first residual sum with the norm that reads it; both norms round their results once, to the type in
    which the linear layers compute."""
    first, second = norms.get(layer.input_layernorm), norms.get(layer.post_attention_layernorm)
    if first is None or second is None or not (is_untouched(first.module) and is_untouched(second.module)):
        return None
    plain = layer.forward

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        if arguments:
            return plain(hidden_states, *arguments, **named)
        residual, x = first.after(hidden_states, None, check.dtype)
        attended = layer.self_attn(hidden_states=x, **named)[0]
        residual, x = second.after(residual, attended, check.dtype)
        return residual + layer.mlp(x)

    # Stand-ins as large as the residual stream: a factor after small outputs of real weights would not show.
    stand_ins: dict[nn.Module, Forward] = {
        layer.self_attn: lambda hidden_states, **_: (hidden_states.to(check.dtype).roll(1, -1), None),
        layer.mlp: lambda x: x.to(check.dtype).roll(2, -1),
    }
    with forwards_replaced(stand_ins):
        agree = check.agree(forward, plain, [check.random(1, 5, len(layer.input_layernorm.weight))], ROUNDING)
    return forward if agree else None
