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

from dapo_rl.models.kernels.gated_mlp import gated_product
from dapo_rl.models.kernels.joint_linear import joint_linear
from dapo_rl.models.kernels.module_patterns import (
    ROTARY,
    Handed,
    activation_of,
    can_join,
    fused_rotary,
    has_its_own_forward,
    has_joint_gate,
    has_projections,
    is_layer,
    is_mlp,
    is_norm,
    norm_form,
    stacks_of,
    with_global,
)
from dapo_rl.models.kernels.norm import add_and_norm
from dapo_rl.models.kernels.rotary import rotated
from dapo_rl.models.recompute import forwards_replaced

ROUNDING = 0.02
"""Relative difference between two computations in bfloat16; another activation or factor changes far more."""

Forward = Callable[..., Any]


class TrainingFusion:
    def __init__(
        self, model: Any, device: torch.device, dtype: torch.dtype, gather: Callable[[nn.Module], None] | None = None
    ) -> None:
        """`dtype` is the type of autocast. `gather` makes the parameters of a module whole before it is tried, if they
        are sharded; modules come layer by layer."""
        self.counts: Counter[str] = Counter()
        """What is fused."""
        self.left: Counter[str] = Counter()
        """What was recognised by name but computes something else."""
        self._forwards: dict[nn.Module, Forward] = {}
        self._joints: list[JointProjection] = []
        self._gather = gather or (lambda module: None)
        self._rotaries: dict[Any, Forward | None] = {}
        check = GradientCheck(device, dtype)
        modules = [module for module in model.modules() if has_its_own_forward(module)]
        # Without the cache, because it would keep casts of all weights until the end.
        with torch.enable_grad(), torch.autocast(check.device.type, dtype, cache_enabled=False):
            norms = self._norms(modules, check)
            for module in modules:
                self._gather(module)
                if is_layer(module):
                    self._offer("layer", module, _fused_layer(module, norms, check))
                elif is_mlp(module):
                    self._offer("MLP", module, _fused_mlp(module, check))
                elif isinstance(code := type(module).forward, FunctionType) and ROTARY in code.__code__.co_names:
                    self._offer("rotary embedding", module, self._with_rotary(module, code, check))
                if has_projections(module):
                    self._project([module.q_proj, module.k_proj, module.v_proj], check)
                for name in {"o_proj", "down_proj"} & module._modules.keys():
                    self._project([module._modules[name]], check)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run a backward pass that recomputes layers inside too."""
        with forwards_replaced(self._forwards):
            try:
                yield
            finally:
                for joint in self._joints:
                    joint.forget()

    def _offer(self, what: str, module: nn.Module, forward: Forward | None) -> None:
        if forward is None:
            self.left[what] += 1
        else:
            self.counts[what] += 1
            self._forwards[module] = forward

    def _norms(self, modules: Sequence[Any], check: GradientCheck) -> dict[nn.Module, TrainedNorm]:
        last = {norm for _, norm in stacks_of(modules)}
        norms: dict[nn.Module, TrainedNorm] = {}
        for module in filter(is_norm, modules):
            self._gather(module)
            norm = _trained_norm(module, check)
            # The head rounds the last norm's result to the type of autocast; other norms keep their type.
            dtype = check.dtype if module in last else None
            self._offer("norm", module, None if norm is None else norm.alone(dtype))
            if norm is not None:
                norms[module] = norm
        return norms

    def _project(self, linears: Sequence[Any], check: GradientCheck) -> None:
        if not (can_join(linears) and all(map(_is_untouched, linears))):
            return
        joint = JointProjection(linears, check.dtype)
        forwards = joint.forwards()
        x = check.random(1, 5, linears[0].in_features)
        if check.agree(
            lambda x: [forward(x) for forward in forwards], lambda x: [linear(x) for linear in linears], [x], ROUNDING
        ):
            self.counts["projection"] += 1
            self._joints.append(joint)
            self._forwards |= zip(linears, forwards, strict=True)

    def _with_rotary(self, attention: Any, code: FunctionType, check: GradientCheck) -> Forward | None:
        """The attention's own code with a fused rotary embedding."""
        plain, width = code.__globals__.get(ROTARY), getattr(attention, "head_dim", None)
        if plain is None or not isinstance(width, int):
            return None
        if (plain, width) not in self._rotaries:
            self._rotaries[plain, width] = _trained_rotary(plain, width, check)
        fused = self._rotaries[plain, width]
        own = None if fused is None else with_global(code, ROTARY, fused)
        return None if own is None else MethodType(own, attention)


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Compares a replacement with the module that it replaces: results and gradients, on random inputs."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """From a generator of its own, so that the global one is not advanced."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return x.to(self.device, dtype).requires_grad_()

    def agree(self, ours: Forward, theirs: Forward, inputs: Sequence[Tensor], tolerance: float) -> bool:
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


def _is_untouched(module: nn.Module) -> bool:
    """Whether nobody has hooked into the module or set its `forward`, so that its work can be done without calling
    it."""
    return has_its_own_forward(module) and not (module._forward_hooks or module._forward_pre_hooks)


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


def _trained_norm(module: Any, check: GradientCheck) -> TrainedNorm | None:
    def agrees(eps: float, plus_one: bool) -> bool:
        inputs = [check.random(5, len(module.weight)), check.random(len(module.weight), seed=1)]
        return check.agree(
            lambda x, weight: add_and_norm(x, None, weight, eps, plus_one, torch.float32)[1],
            lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)),
            inputs,
            1e-4,
        )

    form = norm_form(module, agrees)
    return None if form is None else TrainedNorm(module, *form)


def _fused_layer(layer: Any, norms: Mapping[nn.Module, TrainedNorm], check: GradientCheck) -> Forward | None:
    """Fuses the first residual sum with the norm that reads it; both norms round their results once, to the type in
    which the linear layers compute."""
    first, second = norms.get(layer.input_layernorm), norms.get(layer.post_attention_layernorm)
    if first is None or second is None or not (_is_untouched(first.module) and _is_untouched(second.module)):
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


def _joined(x: Tensor, linears: Sequence[Any], dtype: torch.dtype) -> Tensor:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return joint_linear(x, [linear.weight for linear in linears], biases, dtype)


class JointProjection:
    """Linear layers as one product: the first computes it and keeps the results of the others, such as keys and
    values, until they are called with the same input."""

    def __init__(self, linears: Sequence[Any], dtype: torch.dtype) -> None:
        self._linears, self._dtype = linears, dtype
        self._handed = [Handed() for _ in linears[1:]]

    def forwards(self) -> list[Forward]:
        later = zip(self._linears[1:], self._handed, strict=True)
        return [self._first, *(partial(self._later, linear, handed) for linear, handed in later)]

    def forget(self) -> None:
        """A result that nobody took, after an error, would keep the whole graph in memory."""
        for handed in self._handed:
            handed.leave(None, None)

    def _first(self, x: Tensor) -> Tensor:
        sizes = [linear.out_features for linear in self._linears]
        results: tuple[Tensor, ...] = _joined(x, self._linears, self._dtype).split(sizes, dim=-1)
        first, *others = results
        for handed, other in zip(self._handed, others, strict=True):
            handed.leave(x, other)
        return first

    def _later(self, linear: Any, handed: Handed, x: Tensor) -> Tensor:
        result = handed.take(x)
        return F.linear(x, linear.weight, linear.bias) if result is None else result


def _fused_mlp(mlp: Any, check: GradientCheck) -> Forward | None:
    kind, is_joint = activation_of(mlp), has_joint_gate(mlp)
    if kind is None:
        return None

    def with_one_product(x: Tensor) -> Any:
        return mlp.down_proj(gated_product(_joined(x, (mlp.gate_proj, mlp.up_proj), check.dtype), None, kind))

    def separate(x: Tensor) -> Any:
        return mlp.down_proj(gated_product(mlp.gate_proj(x), mlp.up_proj(x), kind))

    def joint(hidden_states: Tensor) -> Any:
        return mlp.down_proj(gated_product(mlp.gate_up_proj(hidden_states), None, kind))

    linears = [] if is_joint else [mlp.gate_proj, mlp.up_proj]
    join = not is_joint and can_join(linears) and all(map(_is_untouched, linears))
    forward = joint if is_joint else with_one_product if join else separate
    width = getattr(mlp.gate_up_proj if is_joint else mlp.gate_proj, "in_features", 0)
    return forward if check.agree(forward, mlp.forward, [check.random(1, 5, width)], ROUNDING) else None


def _trained_rotary(plain: Forward, width: int, check: GradientCheck) -> Forward | None:
    q, k = (
        check.random(1, 5, heads, width, seed=heads, dtype=check.dtype).transpose(1, 2).detach().requires_grad_()
        for heads in (4, 2)
    )

    def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, k, cos, sin, check.dtype)

    def agrees(part: int) -> bool:
        cos, sin = (check.random(1, 5, part, seed=seed).detach() for seed in (2, 3))
        return check.agree(lambda q, k: ours(q, k, cos, sin), lambda q, k: plain(q, k, cos, sin), [q, k], ROUNDING)

    return fused_rotary(plain, ours, agrees, width)
