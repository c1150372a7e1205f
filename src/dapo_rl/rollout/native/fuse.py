"""Fuses the operations of a Hugging Face module into fewer kernels, for inference.

Projections of the same input become one product with a joint weight, and the module's parameters become views of it.
Norms, gated activations, the rotary embedding and residual sums go through `ops`. Each replacement is first compared
with the original, and skipped if the two differ by more than rounding.

`fuse(model)` prepares the module. It runs fused inside `with fused:`, and as it was loaded outside, except for where
its weights are stored. New weights must be copied into the parameters in place. Shapes: T tokens, N hidden size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.rollout.native.prepack import Prepacked

_MISSING = object()


class Ops(Protocol):
    """The operations that `kernels` provides; tests pass their own."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool
    ) -> tuple[Tensor, Tensor]: ...

    def gated(self, gate_up: Tensor, kind: Literal["silu", "gelu_tanh"]) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


def fuse(model: Any, ops: Ops | None = None, prepack: bool = False) -> Fused:
    """By default `ops` are the kernels on a CUDA device; elsewhere only projections are fused. `prepack` is for
    CPUs."""
    some = next(model.parameters())
    if ops is None and some.device.type == "cuda":
        from dapo_rl.rollout.native import kernels

        ops = kernels
    fused = Fused()
    # A joint weight is an inference tensor only if the parameters are: other parameters may be trained.
    with torch.inference_mode(some.is_inference()), torch.no_grad():
        for module in list(model.modules()):
            if {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys():
                fused.offer("MLP", _mlp(module, ops, fused.joins))
            elif {"gate_up_proj", "down_proj"} <= module._modules.keys() and ops is not None:
                fused.offer("MLP", _joint_mlp(module, ops))
            elif {"q_proj", "k_proj", "v_proj"} <= module._modules.keys():
                fused.offer("attention", _projections(module, fused.joins))
        if ops is not None:
            norms = _norms(model, ops, fused)
            for layer, following in _chain(model):
                fused.offer("layer", _layer(layer, norms, following, ops))
            fused.offer("head", _head(model))
            for attention in {type(m): m for m in model.modules() if hasattr(m, "head_dim")}.values():
                fused.offer("rotary embedding", _rotary(attention, ops))
        if prepack:
            _prepack(model, fused)
    return fused


@dataclass(frozen=True, slots=True)
class Patch:
    owner: Any
    name: str
    replacement: Callable[..., Any]


@dataclass(slots=True)
class Fused:
    """A context manager that applies the replacements."""

    patches: list[Patch] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    prepacked: list[Prepacked] = field(default_factory=list)
    _before: list[tuple[Patch, Any]] = field(default_factory=list)

    def offer(self, what: str, patches: list[Patch] | None) -> None:
        """Adds patches that agree with the module, and counts those that do not (None). An empty list means that
        there is nothing to replace."""
        if patches is None:
            self.left[what] += 1
        elif patches:
            self.counts[what] += 1
            self.patches += patches

    def refresh(self) -> None:
        """Must be called after the weights change."""
        for product in self.prepacked:
            product.refresh()

    def report(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items()) or "nothing"

        return f"fused {listed(self.counts)}" + (f"; not fused: {listed(self.left)}" if self.left else "")

    def intact(self) -> bool:
        """Whether the parameters are still views of the joint weights; false after one was reassigned or moved."""
        return all(join.intact() for join in self.joins)

    def __enter__(self) -> Fused:
        if self._before:
            raise RuntimeError("the module is already fused")
        for patch in self.patches:
            self._before.append((patch, vars(patch.owner).get(patch.name, _MISSING)))
            setattr(patch.owner, patch.name, patch.replacement)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            patch, before = self._before.pop()
            if before is _MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, before)


class Handed:
    """A result that one module computes for another: for one input, to be used once."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._result: Tensor | None = None

    def leave(self, x: Tensor, result: Tensor) -> None:
        self._input, self._result = x, result

    def take(self, x: Tensor) -> Tensor | None:
        if self._input is not x:
            return None
        result, self._input, self._result = self._result, None, None
        return result


# Projections.


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

    def _join(self, parameters: Sequence[Tensor]) -> Tensor:
        joint = _already_joint(parameters)
        if joint is None:
            joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, piece in zip(parameters, joint.split(self.sizes), strict=True):
            parameter.data = piece
            self._pairs.append((parameter, piece))
        return joint


def _already_joint(parameters: Sequence[Tensor]) -> Tensor | None:
    """The joint tensor, if the same parameters were joined before."""
    first, place = parameters[0].data, parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and parameter.is_contiguous() and parameter.data_ptr() == place):
            return None
        place += parameter.numel() * parameter.element_size()
    rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _projections(attention: Any, joins: list[Join]) -> list[Patch] | None:
    """The query projection computes all three, and stores keys and values for the other two."""
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    if not Join.possible(linears):
        return None
    x = _random((1, 3, linears[0].in_features), linears[0].weight)
    expected = [linear(x) for linear in linears]
    join = Join(linears)
    joins.append(join)
    key_value = (Handed(), Handed())

    def query(x: Tensor) -> Tensor:
        q: Tensor
        q, *others = join(x).split(join.sizes, dim=-1)
        for handed, result in zip(key_value, others, strict=True):
            handed.leave(x, result)
        return q

    def other(linear: nn.Linear, handed: Handed) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            result = handed.take(x)
            return F.linear(x, linear.weight, linear.bias) if result is None else result

        return forward

    forwards = [query, *(other(linear, handed) for linear, handed in zip(linears[1:], key_value, strict=True))]
    if not all(_agree(forward(x), y) for forward, y in zip(forwards, expected, strict=True)):
        return None
    return [Patch(linear, "forward", forward) for linear, forward in zip(linears, forwards, strict=True)]


def _mlp(mlp: Any, ops: Ops | None, joins: list[Join]) -> list[Patch] | None:
    linears = [mlp.gate_proj, mlp.up_proj]
    act = getattr(mlp, "act_fn", None)
    if not Join.possible(linears) or act is None:
        return None
    x = _random((1, 3, mlp.gate_proj.in_features), mlp.gate_proj.weight)
    expected = mlp(x)
    join = Join(linears)
    joins.append(join)
    gated = _gated(act, ops)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(gated(join(x)))
        return out

    return [Patch(mlp, "forward", forward)] if _agree(forward(x), expected) else None


def _joint_mlp(mlp: Any, ops: Ops) -> list[Patch] | None:
    act = getattr(mlp, "activation_fn", None) or getattr(mlp, "act_fn", None)
    if type(mlp.gate_up_proj) is not nn.Linear or act is None:
        return None
    gated = _gated(act, ops)

    def forward(hidden_states: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(gated(mlp.gate_up_proj(hidden_states)))
        return out

    x = _random((1, 3, mlp.gate_up_proj.in_features), mlp.gate_up_proj.weight)
    return [Patch(mlp, "forward", forward)] if _agree(forward(x), mlp(x)) else None


def _gated(act: Callable[[Tensor], Tensor], ops: Ops | None) -> Callable[[Tensor], Tensor]:
    """A function that computes `act(gate) * up` from the joint product."""
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


def _prepack(model: Any, fused: Fused) -> None:
    """Prepacks the joint projections and all other linear layers."""
    joined = set[int]()
    for join in fused.joins:
        join.prepacked = Prepacked(join.weight, join.bias)
        fused.prepacked.append(join.prepacked)
        joined |= {id(parameter) for parameter, _ in join._pairs}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in joined:
            fused.prepacked.append(Prepacked(module.weight, module.bias))
            fused.patches.append(Patch(module, "forward", fused.prepacked[-1]))


# Norms, residual sums, the rotary embedding.


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float
    plus_one: bool
    ahead: Handed


def _norms(model: Any, ops: Ops, fused: Fused) -> dict[nn.Module, Norm]:
    norms: dict[nn.Module, Norm] = {}
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
            norm = _recognised(module, ops)
            fused.offer("norm", None if norm is None else [Patch(module, "forward", _norm_forward(module, norm, ops))])
            if norm is not None:
                norms[module] = norm
    return norms


def _recognised(module: Any, ops: Ops) -> Norm | None:
    """Recognises Llama's and Gemma's norm by their output for a random weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    x, weight = _random((1, 3, len(module.weight)), module.weight), _random(module.weight.shape, module.weight, seed=1)
    expected = torch.func.functional_call(module, {"weight": weight}, (x,))
    for plus_one in (False, True):
        if _agree(ops.rms_norm(x, weight, eps, plus_one), expected):
            return Norm(module.weight, eps, plus_one, Handed())
    return None


def _norm_forward(module: Any, norm: Norm, ops: Ops) -> Callable[[Tensor], Tensor]:
    plain: Callable[[Tensor], Tensor] = module.forward

    def forward(x: Tensor) -> Tensor:
        ready = norm.ahead.take(x)
        if ready is None and x.dtype == norm.weight.dtype:
            ready = ops.rms_norm(x, norm.weight, norm.eps, norm.plus_one)
        return plain(x) if ready is None else ready

    return forward


def _chain(model: Any) -> Iterator[tuple[Any, Any]]:
    """Pre-norm decoder layers, each with the norm that reads its output."""
    for stack in model.modules():
        layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(last, nn.Module):
            following = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            yield from zip(layers, [*following, last], strict=True)


def _layer(layer: Any, norms: dict[nn.Module, Norm], following: nn.Module | None, ops: Ops) -> list[Patch] | None:
    """Fuses the layer's two residual sums with the norms that read them; the second result goes to the next layer."""
    if not {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"} <= layer._modules.keys():
        return None
    inner = norms.get(layer.post_attention_layernorm)
    outer = norms.get(following) if following is not None else None
    if inner is None or outer is None or following is None or layer.input_layernorm not in norms:
        return None
    plain = layer.forward

    def forward(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        if arguments or hidden_states.dtype != inner.weight.dtype:
            return plain(hidden_states, *arguments, **named)
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **named)[0]
        x, residual = ops.add_rms_norm(attended, hidden_states, inner.weight, inner.eps, inner.plus_one)
        x, total = ops.add_rms_norm(layer.mlp(x), residual, outer.weight, outer.eps, outer.plus_one)
        outer.ahead.leave(total, x)
        return total

    def stand_in(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        return hidden_states.roll(1, -1), None

    x = _random((1, 3, len(inner.weight)), inner.weight)
    with Fused([Patch(layer.self_attn, "forward", stand_in)]):
        try:
            expected, got = plain(x), forward(x)
        except (TypeError, AttributeError):  # The layer needs more arguments, or its MLP returns more than a tensor.
            return None
        ahead = outer.ahead.take(got)
        agree = _agree(got, expected) and ahead is not None and _agree(ahead, following(expected))
    return [Patch(layer, "forward", forward)] if agree else None


def _head(model: Any) -> list[Patch] | None:
    """Keeps the logits in float32: rounding them to bfloat16 would change probabilities by about a percent."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    if head.weight.dtype == torch.float32 or not head.weight.is_cuda:
        return []

    def forward(x: Tensor) -> Tensor:
        return torch.mm(x.flatten(0, -2), head.weight.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])

    x = _random((1, 3, head.in_features), head.weight)
    return [Patch(head, "forward", forward)] if _agree(forward(x).to(x.dtype), head(x)) else None


def _rotary(attention: Any, ops: Ops) -> list[Patch] | None:
    """Replaces `apply_rotary_pos_emb` in the modeling file, whose attention looks it up as a global."""
    file = sys.modules[type(attention).__module__]
    plain = getattr(file, "apply_rotary_pos_emb", None)
    if plain is None:
        return []
    like = next(attention.parameters())
    D = attention.head_dim
    q, k = (_random((1, 3, heads, D), like, seed).transpose(1, 2) for seed, heads in enumerate((4, 2)))

    def agrees(width: int) -> bool:
        cos, sin = (_random((1, 3, width), like, seed) for seed in (2, 3))
        try:
            expected = plain(q, k, cos, sin)
        except (RuntimeError, TypeError):
            return False
        got = ops.rotary(q, k, cos, sin)
        return all(_agree(a, b) for a, b in zip(got, expected, strict=True))

    if not agrees(D):
        return None
    partial = agrees(D // 4 * 2)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
        usual = q.dim() == 4 and cos.shape == (1, q.shape[2], cos.shape[-1]) and q.dtype == k.dtype == cos.dtype
        whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if arguments or named or not usual or len(q) != 1 or not (whole or partial):
            return plain(q, k, cos, sin, *arguments, **named)
        return ops.rotary(q, k, cos, sin)

    return [Patch(file, "apply_rotary_pos_emb", rotary)]


def _agree(a: Tensor, b: Any) -> bool:
    """Whether two tensors are equal up to a few rounding errors at the scale of the tensor's RMS value."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    step = 4 * max(torch.finfo(b.dtype).eps, 1e-5)
    scale = b.double().pow(2).mean().sqrt().item()
    return torch.allclose(a.double(), b.double(), rtol=step, atol=step * scale)


def _random(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Normal random numbers from a separate generator, so that the global one is not advanced."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.to(like.device, like.dtype)
