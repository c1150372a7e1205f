"""Replaces the forward passes of a Hugging Face module by fused ones, for the update under autocast.

Norms, the residual sums before them, gated activations and rotary embeddings are recognised by what they compute: a
replacement is used only if its results and gradients for random inputs are those of the module. The module's classes,
parameters and their names stay as they are, and outside `with fusion.active():` nothing is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dapo_rl.models.fused.gated import GatedKind, gated_product
from dapo_rl.models.fused.linear import joint_linear
from dapo_rl.models.fused.norm import add_and_norm
from dapo_rl.models.fused.rotary import rotated

_ROUNDING = 0.02
"""Relative difference between two computations in bfloat16; another activation or factor changes far more."""
_ROTARY = "apply_rotary_pos_emb"

Forward = Callable[..., Any]


class TrainingFusion:
    """The replacements for one model; `dtype` is the type of autocast."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.counts: Counter[str] = Counter()
        """What is fused."""
        self.left: Counter[str] = Counter()
        """What was recognised by name but computes something else."""
        self._forwards: dict[nn.Module, Forward] = {}
        self._joints: list[_JointProjection] = []
        check = _Check(next(model.parameters()).device, dtype)
        modules = [module for module in model.modules() if _is_untouched(module)]
        # Without the cache, because it would keep casts of all weights until the end.
        with torch.enable_grad(), torch.autocast(check.device.type, dtype, cache_enabled=False):
            norms = self._norms(modules, check)
            rotaries = _Rotaries(check)
            for module in modules:
                parts = module._modules.keys()
                if {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"} <= parts:
                    self._offer("layer", module, _layer(module, norms, check))
                elif {"gate_proj", "up_proj", "down_proj"} <= parts or {"gate_up_proj", "down_proj"} <= parts:
                    self._offer("MLP", module, _mlp(module, check))
                elif isinstance(code := type(module).forward, FunctionType) and _ROTARY in code.__code__.co_names:
                    self._offer("rotary embedding", module, rotaries.inside(module, code))
                if {"q_proj", "k_proj", "v_proj"} <= parts:
                    self._project([module.q_proj, module.k_proj, module.v_proj], check)
                for name in {"o_proj", "down_proj"} & parts:
                    self._project([module._modules[name]], check)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run a backward pass that recomputes layers inside too."""
        with _replaced(self._forwards):
            try:
                yield
            finally:
                for joint in self._joints:
                    joint.forget()

    def _project(self, linears: Sequence[Any], check: _Check) -> None:
        if not _can_join(linears):
            return
        joint = _JointProjection(linears, check.dtype)
        forwards = joint.forwards()
        x = check.random(1, 5, linears[0].in_features)
        if check.agree(
            lambda x: [forward(x) for forward in forwards], lambda x: [linear(x) for linear in linears], [x], _ROUNDING
        ):
            self.counts["projection"] += 1
            self._joints.append(joint)
            self._forwards |= zip(linears, forwards, strict=True)

    def report(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items()) or "nothing"

        return f"fused {listed(self.counts)}" + (f"; not fused: {listed(self.left)}" if self.left else "")

    def _norms(self, modules: Sequence[Any], check: _Check) -> dict[nn.Module, _RMSNorm]:
        stacks = [m for m in modules if isinstance(getattr(m, "layers", None), nn.ModuleList)]
        last = {stack._modules.get("norm") for stack in stacks}
        norms: dict[nn.Module, _RMSNorm] = {}
        for module in modules:
            if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
                norm = _norm(module, check)
                # The head rounds the last norm's result to the type of autocast; other norms keep their type.
                dtype = check.dtype if module in last else None
                self._offer("norm", module, None if norm is None else norm.alone(dtype))
                if norm is not None:
                    norms[module] = norm
        return norms

    def _offer(self, what: str, module: nn.Module, forward: Forward | None) -> None:
        if forward is None:
            self.left[what] += 1
        else:
            self.counts[what] += 1
            self._forwards[module] = forward


def _is_untouched(module: nn.Module) -> bool:
    """Whether nobody has hooked into the module: what replaces it may not call its parts one by one."""
    return "forward" not in vars(module) and not (module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del vars(module)["forward"]


@dataclass(frozen=True, slots=True)
class _Check:
    """Compares replacements with what they replace."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """From a generator of its own, so that the global one is not advanced."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return x.to(self.device, dtype).requires_grad_()

    def agree(self, ours: Forward, theirs: Forward, inputs: Sequence[Tensor], tolerance: float) -> bool:
        """Whether the results and the gradients of the inputs are the same."""
        try:
            results, expected = self._computed(ours, inputs), self._computed(theirs, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a module may need other arguments, or return something else than tensors
            return False
        return len(results) == len(expected) and all(
            a.shape == b.shape and (a - b).norm() <= tolerance * b.norm()
            for a, b in zip(results, expected, strict=True)
        )

    def _computed(self, forward: Forward, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = forward(*inputs)
        results = [results] if isinstance(results, Tensor) else list(results)
        factors = [self.random(*x.shape, seed=100 + i).detach().to(x.dtype) for i, x in enumerate(results)]
        return [x.detach().float() for x in (*results, *torch.autograd.grad(results, inputs, factors))]


# Norms and layers.


@dataclass(frozen=True, slots=True)
class _RMSNorm:
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


def _norm(module: Any, check: _Check) -> _RMSNorm | None:
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
            return _RMSNorm(module, eps, plus_one)
    return None


def _layer(layer: Any, norms: Mapping[nn.Module, _RMSNorm], check: _Check) -> Forward | None:
    """Fuses the first residual sum with the norm that reads it; both norms round their results once, to the type in
    which the linear layers compute."""
    first, second = norms.get(layer.input_layernorm), norms.get(layer.post_attention_layernorm)
    if first is None or second is None:
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
    with _replaced(stand_ins):
        agree = check.agree(forward, plain, [check.random(1, 5, len(layer.input_layernorm.weight))], _ROUNDING)
    return forward if agree else None


# Projections and gated activations.


def _can_join(linears: Sequence[Any]) -> bool:
    """Plain linear layers; adapters wrap theirs."""
    first = linears[0]
    return all(
        type(linear) is nn.Linear
        and _is_untouched(linear)
        and linear.in_features == first.in_features
        and (linear.bias is None) == (first.bias is None)
        and linear.weight.dtype == first.weight.dtype
        for linear in linears
    )


def _joined(x: Tensor, linears: Sequence[Any], dtype: torch.dtype) -> Tensor:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return joint_linear(x, [linear.weight for linear in linears], biases, dtype)


class _JointProjection:
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


def _mlp(mlp: Any, check: _Check) -> Forward | None:
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
    forward = joint if is_joint else with_one_product if _can_join((mlp.gate_proj, mlp.up_proj)) else separate
    width = getattr(mlp.gate_up_proj if is_joint else mlp.gate_proj, "in_features", 0)
    return forward if check.agree(forward, mlp.forward, [check.random(1, 5, width)], _ROUNDING) else None


def _kind(act: Callable[[Tensor], Tensor]) -> GatedKind | None:
    x = torch.linspace(-8, 8, 257)
    kinds: dict[GatedKind, Tensor] = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    try:
        y = act(x)
    except RuntimeError:  # an activation with parameters on another device
        return None
    return next((kind for kind, expected in kinds.items() if torch.allclose(y, expected, rtol=1e-5, atol=1e-5)), None)


# The rotary embedding.


class _Rotaries:
    """Fused rotary embeddings in the place of those that modeling files define."""

    def __init__(self, check: _Check) -> None:
        self._check = check
        self._globals: dict[Any, dict[str, Any] | None] = {}

    def inside(self, attention: Any, code: FunctionType) -> Forward | None:
        """The attention's own code with globals of its own, because other models share those of the modeling file."""
        plain, width = code.__globals__.get(_ROTARY), getattr(attention, "head_dim", None)
        if plain is None or not isinstance(width, int):
            return None
        if (plain, width) not in self._globals:
            fused = self._rotary(plain, width)
            self._globals[plain, width] = None if fused is None else {**code.__globals__, _ROTARY: fused}
        names = self._globals[plain, width]
        if names is None:
            return None
        own = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        own.__kwdefaults__ = code.__kwdefaults__
        return MethodType(own, attention)

    def _rotary(self, plain: Forward, width: int) -> Forward | None:
        check = self._check
        q, k = (
            check.random(1, 5, heads, width, seed=heads, dtype=check.dtype).transpose(1, 2).detach().requires_grad_()
            for heads in (4, 2)
        )

        def agrees(part: int) -> bool:
            cos, sin = (check.random(1, 5, part, seed=seed).detach() for seed in (2, 3))
            return check.agree(
                lambda q, k: rotated(q, k, cos, sin, check.dtype),
                lambda q, k: plain(q, k, cos, sin),
                [q, k],
                _ROUNDING,
            )

        if not agrees(width):
            return None
        takes_part = agrees(width // 4 * 2)

        def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
            one_row = q.dim() == 4 and len(q) == 1 and cos.shape == (1, q.shape[2], cos.shape[-1])
            whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
            if arguments or named or not one_row or not (whole or takes_part):
                return plain(q, k, cos, sin, *arguments, **named)
            return rotated(q, k, cos, sin, check.dtype)

        return rotary
