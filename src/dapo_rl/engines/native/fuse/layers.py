"""Pre-norm decoder layers: each residual sum and the norm that reads it in one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dapo_rl.engines.native.fuse.change import Change, FusedModule
from dapo_rl.engines.native.fuse.compare import agree, random_like
from dapo_rl.engines.native.fuse.norms import Norm


def chain(model: Any) -> Iterator[tuple[Any, Any]]:
    """Pre-norm decoder layers, each with the norm that reads its output."""
    for stack in model.modules():
        layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(last, nn.Module):
            following = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            yield from zip(layers, [*following, last], strict=True)


class FusedLayer(FusedModule):
    fused: tuple[Norm, Norm]
    """The norm between attention and MLP, and the one that reads the layer's output."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        inner, outer = self.fused
        if arguments or hidden_states.dtype != inner.weight.dtype:
            return super().forward(hidden_states, *arguments, **named)
        return _run(self, inner, outer, hidden_states, named)


def _run(layer: Any, inner: Norm, outer: Norm, hidden_states: Tensor, named: Mapping[str, Any]) -> Tensor:
    """The second norm goes to the next layer."""
    attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **named)[0]
    x, residual = inner.of_sum(attended, hidden_states)
    x, total = outer.of_sum(layer.mlp(x), residual)
    outer.ahead.leave(total, x)
    return total


class _StandIn(nn.Module):
    """Takes the place of the attention in a comparison: it needs no positions, and no mask."""

    def forward(self, hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        return hidden_states.roll(1, -1), None


def fuse_layer(layer: Any, norms: Mapping[nn.Module, Norm], following: nn.Module | None) -> list[Change] | None:
    if not {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"} <= layer._modules.keys():
        return None
    inner = norms.get(layer.post_attention_layernorm)
    outer = norms.get(following) if following is not None else None
    if inner is None or outer is None or following is None or layer.input_layernorm not in norms:
        return None
    x = random_like((1, 3, len(inner.weight)), inner.weight)
    attention = layer.self_attn
    layer.self_attn = _StandIn()
    try:
        expected, got = layer.forward(x), _run(layer, inner, outer, x, {})
    except (TypeError, AttributeError):  # The layer needs more arguments, or its MLP returns more than a tensor.
        return None
    finally:
        layer.self_attn = attention
    ahead = outer.ahead.take(got)
    agrees = agree(got, expected) and ahead is not None and agree(ahead, following(expected))
    return [Change(layer, FusedLayer, (inner, outer))] if agrees else None
