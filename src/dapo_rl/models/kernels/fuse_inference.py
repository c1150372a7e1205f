"""Fuses the operations of a Hugging Face module into fewer kernels, for inference.

Projections of the same input become one product with a joint weight, and the module's parameters become views of it.
Norms, gated activations, the rotary embedding and residual sums go through `ops`. Each replacement is first compared
with the original, and skipped if the two differ by more than rounding.

`fuse(model)` changes the module for good, so an engine fuses its own copy of the trained module. Parameters keep their
names; new weights must be copied into them in place.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dapo_rl.models.kernels.fuse_linears import Join, Prepacked, fuse_head, fuse_projections, prepack_linears
from dapo_rl.models.kernels.module_patterns import (
    ROTARY,
    Activation,
    Change,
    FusedModule,
    Handed,
    activation_of,
    agree,
    can_join,
    fused_rotary,
    has_its_own_forward,
    has_joint_gate,
    has_projections,
    is_layer,
    is_mlp,
    is_norm,
    make_changes,
    norm_form,
    random_like,
    stacks_of,
    with_global,
)


class Ops(Protocol):
    """The operations that fused modules call: Triton's on a GPU, the tests' own elsewhere."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]: ...

    def gated_linear(self, x: Tensor, weight_2IN: Tensor, bias: Tensor | None, kind: Activation) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(slots=True)
class Fused:
    joins: list[Join] = field(default_factory=list)
    prepacked: list[Prepacked] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    changes: list[Change] = field(default_factory=list)

    def offer(self, what: str, changes: list[Change] | None) -> None:
        """Adds changes that agree with the module, and counts those that do not (None). An empty list means that
        there is nothing to change. A `forward` that was set on an instance would hide the one of its class."""
        if changes is None or not all(has_its_own_forward(change.module) for change in changes):
            self.left[what] += 1
        elif changes:
            self.counts[what] += 1
            self.changes += changes

    def refresh(self) -> None:
        """Must be called after the weights change."""
        for product in self.prepacked:
            product.refresh()


def fuse(model: Any, ops: Ops | None = None, prepack: bool = False) -> Fused:
    """Changes the module in place. By default `ops` are the kernels on a CUDA device; elsewhere only projections are
    fused. `prepack` is for CPUs."""
    if any(isinstance(module, FusedModule) for module in model.modules()):
        raise RuntimeError("the module is already fused")
    some = next(model.parameters())
    if ops is None and some.device.type == "cuda":
        from dapo_rl.models.kernels import decode_ops

        ops = decode_ops
    fused = Fused()
    # A joint weight is an inference tensor only if the parameters are: other parameters may be trained.
    with torch.inference_mode(some.is_inference()), torch.no_grad():
        for module in model.modules():
            if is_mlp(module) and (ops is not None or not has_joint_gate(module)):
                fused.offer("MLP", _fuse_mlp(module, ops, fused.joins))
            elif has_projections(module):
                fused.offer("attention", fuse_projections(module, fused.joins))
        if ops is not None:
            _use_ops(model, ops, fused)
        if prepack:
            fused.changes += prepack_linears(model, fused.joins, fused.prepacked)
    # Last, so that every comparison is with the original.
    make_changes(fused.changes)
    return fused


def _use_ops(model: Any, ops: Ops, fused: Fused) -> None:
    norms: dict[Any, Norm] = {}
    for module in filter(is_norm, model.modules()):
        norm = _recognised_norm(module, ops)
        fused.offer("norm", None if norm is None else [Change(module, FusedNorm, norm)])
        if norm is not None:
            norms[module] = norm
    for layer, following in _chain(model):
        fused.offer("layer", _fuse_layer(layer, norms, following))
    fused.offer("head", fuse_head(model))
    attentions: dict[type, list[Any]] = {}
    for module in model.modules():
        if hasattr(module, "head_dim"):
            attentions.setdefault(type(module), []).append(module)
    for modules in attentions.values():
        fused.offer("rotary embedding", _fuse_rotary(modules, ops))


# Norms, and pre-norm decoder layers: each residual sum and the norm that reads it in one kernel.


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, which a layer can compute along with its residual sum and leave `ahead`."""

    ops: Ops
    weight: Tensor
    eps: float
    plus_one: bool
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


def _recognised_norm(module: Any, ops: Ops) -> Norm | None:
    def agrees(eps: float, plus_one: bool) -> bool:
        x = random_like((1, 3, len(module.weight)), module.weight)
        weight = random_like(module.weight.shape, module.weight, seed=1)
        expected = torch.func.functional_call(module, {"weight": weight}, (x,))
        return agree(ops.rms_norm(x, weight, eps, plus_one), expected)

    form = norm_form(module, agrees)
    return None if form is None else Norm(ops, module.weight, *form)


def _chain(model: Any) -> Iterator[tuple[Any, Any]]:
    """Layers, each with the norm that reads its output."""
    for layers, last in stacks_of(list(model.modules())):
        following = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
        yield from zip(layers, [*following, last], strict=True)


class FusedLayer(FusedModule):
    fused: tuple[Norm, Norm]
    """The norm between attention and MLP, and the one that reads the layer's output."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        inner, outer = self.fused
        if arguments or hidden_states.dtype != inner.weight.dtype:
            return super().forward(hidden_states, *arguments, **named)
        return _run_layer(self, inner, outer, hidden_states, named)


def _run_layer(layer: Any, inner: Norm, outer: Norm, hidden_states: Tensor, named: Mapping[str, Any]) -> Tensor:
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


def _fuse_layer(layer: Any, norms: Mapping[nn.Module, Norm], following: nn.Module | None) -> list[Change] | None:
    if not is_layer(layer):
        return None
    inner = norms.get(layer.post_attention_layernorm)
    outer = norms.get(following) if following is not None else None
    if inner is None or outer is None or following is None or layer.input_layernorm not in norms:
        return None
    x = random_like((1, 3, len(inner.weight)), inner.weight)
    attention = layer.self_attn
    layer.self_attn = _StandIn()
    try:
        expected, got = layer.forward(x), _run_layer(layer, inner, outer, x, {})
    except (TypeError, AttributeError):  # The layer needs more arguments, or its MLP returns more than a tensor.
        return None
    finally:
        layer.self_attn = attention
    ahead = outer.ahead.take(got)
    agrees = agree(got, expected) and ahead is not None and agree(ahead, following(expected))
    return [Change(layer, FusedLayer, (inner, outer))] if agrees else None


# MLPs with a gate: one product for gate and input, and one kernel for the activation.


Gated = Callable[[Tensor], Tensor]
"""Computes `act(gate) * up` from the input."""


class FusedMLP(FusedModule):
    fused: Gated
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.fused(x))
        return out


def _fuse_mlp(mlp: Any, ops: Ops | None, joins: list[Join]) -> list[Change] | None:
    is_joint = has_joint_gate(mlp)
    linears = [mlp.gate_up_proj] if is_joint else [mlp.gate_proj, mlp.up_proj]
    kind = None if ops is None else activation_of(mlp)
    act = getattr(mlp, "act_fn", None)
    if not can_join(linears) or (kind if is_joint else act) is None:
        return None
    x = random_like((1, 3, linears[0].in_features), linears[0].weight)
    expected = mlp(x)
    join = Join(linears)
    if not is_joint:
        joins.append(join)
    gated = _gated(join, act, kind, ops)
    return [Change(mlp, FusedMLP, gated)] if agree(mlp.down_proj(gated(x)), expected) else None


def _gated(join: Join, act: Any, kind: Activation | None, ops: Ops | None) -> Gated:
    if ops is not None and kind is not None:
        return lambda x: ops.gated_linear(x, join.weight, join.bias, kind)

    def plain(x: Tensor) -> Tensor:
        gate, up = join(x).chunk(2, dim=-1)
        product: Tensor = act(gate) * up
        return product

    return plain


# The rotary embedding. The trained module reads the same global, so it stays: the engine's attention modules get a copy
# of their `forward` with globals of its own.


def _fuse_rotary(attentions: Sequence[Any], ops: Ops) -> list[Change] | None:
    """The attention modules are of one class."""
    plain_forward = type(attentions[0]).forward
    plain = getattr(inspect.unwrap(plain_forward), "__globals__", {}).get(ROTARY)
    if plain is None:
        return []
    like, width = next(attentions[0].parameters()), attentions[0].head_dim
    q, k = (random_like((1, 3, heads, width), like, seed).transpose(1, 2) for seed, heads in enumerate((4, 2)))

    def agrees(part: int) -> bool:
        cos, sin = (random_like((1, 3, part), like, seed) for seed in (2, 3))
        try:
            expected = plain(q, k, cos, sin)
        except (RuntimeError, TypeError):
            return False
        return all(agree(a, b) for a, b in zip(ops.rotary(q, k, cos, sin), expected, strict=True))

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return (ops.rotary if q.dtype == k.dtype == cos.dtype else plain)(q, k, cos, sin)

    rotary = fused_rotary(plain, ours, agrees, width)
    forward = None if rotary is None else with_global(plain_forward, ROTARY, rotary)
    if forward is None:
        return None
    into = type("FusedRotary", (FusedModule,), {"forward": forward})
    return [Change(attention, into) for attention in attentions]
