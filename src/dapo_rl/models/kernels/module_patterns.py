"""Recognises the modules of a model that a fused kernel can replace, and changes them for inference.

Modules are recognised by the names of their parts. A replacement is used only if it gives the results of the module for
random inputs. A changed module becomes an instance of a subclass of its class, with another `forward`. Its parameters,
children, attributes and hooks do not change, and other modules of the class are not affected. torch's
parametrizations and FSDP change modules in the same way. A `forward` set on the instance would refer back to its
module, and the memory of a discarded model would wait for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Activation = Literal["silu", "gelu_tanh"]
ROTARY = "apply_rotary_pos_emb"
"""The rotary embedding, which attention modules look up as a global of their modeling file."""


def random_like(shape: Sequence[int], like: Tensor, seed: int = 0) -> Tensor:
    """Normal random numbers from a separate generator, so that the global one is not advanced."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return x.to(like.device, like.dtype)


def is_layer(module: nn.Module) -> bool:
    """Whether it looks like a pre-norm decoder layer."""
    return {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"} <= module._modules.keys()


def is_mlp(module: nn.Module) -> bool:
    """Whether it looks like an MLP with a gate."""
    return {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys() or has_joint_gate(module)


def has_joint_gate(module: nn.Module) -> bool:
    """Whether the weights of the gate and the up projection are one as they were loaded."""
    return {"gate_up_proj", "down_proj"} <= module._modules.keys()


def has_projections(module: nn.Module) -> bool:
    """Whether it projects queries, keys and values separately."""
    return {"q_proj", "k_proj", "v_proj"} <= module._modules.keys()


def is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor)


def stacks_of(modules: Sequence[Any]) -> Iterator[tuple[nn.ModuleList, nn.Module]]:
    """Stacks of layers, each with the norm that reads the last one's output."""
    for module in modules:
        layers, last = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(last, nn.Module):
            yield layers, last


def norm_form(module: Any, agrees: Callable[[float, bool], bool]) -> tuple[float, bool] | None:
    """The `eps` of an RMS norm, and whether its weight is an offset from 1, as Gemma's is. `agrees` tries both forms
    with a random weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    return next(((eps, plus_one) for plus_one in (False, True) if agrees(eps, plus_one)), None)


def activation_of(mlp: Any) -> Activation | None:
    """Which of the activations that the kernels compute an MLP has."""
    act = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if act is None:
        return None
    x = torch.linspace(-8, 8, 257)
    kinds: dict[Activation, Tensor] = {"silu": F.silu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
    try:
        y = act(x)
    except RuntimeError:  # an activation with parameters on another device
        return None
    return next((kind for kind, expected in kinds.items() if torch.allclose(y, expected, rtol=1e-5, atol=1e-5)), None)


def can_join(linears: Sequence[Any]) -> bool:
    """Whether they are plain linear layers that one product can compute; adapters wrap theirs."""
    first = linears[0]
    return all(
        type(linear) is nn.Linear
        and linear.in_features == first.in_features
        and (linear.bias is None) == (first.bias is None)
        and (linear.weight.dtype, linear.weight.device) == (first.weight.dtype, first.weight.device)
        for linear in linears
    )


def has_its_own_forward(module: nn.Module) -> bool:
    """Whether no library has set the module's `forward`. Hooks around it run whatever it is."""
    return "forward" not in vars(module)


def fused_rotary(
    plain: Callable[..., Any], ours: Callable[..., Any], agrees: Callable[[int], bool], width: int
) -> Callable[..., Any] | None:
    """`ours` in place of a modeling file's rotary embedding of heads of this width; inputs of another form go to
    `plain`. `agrees` compares the two for cos and sin of a width."""
    if not agrees(width):
        return None
    takes_part = agrees(width // 4 * 2)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *arguments: Any, **named: Any) -> Any:
        one_row = q.dim() == 4 and len(q) == 1 and cos.shape == (1, q.shape[2], cos.shape[-1])
        whole = cos.shape[-1] == q.shape[-1] == k.shape[-1]
        if arguments or named or not one_row or not (whole or takes_part):
            return plain(q, k, cos, sin, *arguments, **named)
        return ours(q, k, cos, sin)

    return rotary


def with_global(function: Any, name: str, value: Any) -> FunctionType | None:
    """A copy of the function that reads `value` as the global `name`, so that other users of its file keep theirs.
    Decorators are copied too. None if the function does not read the global, or if a decorator does not keep the
    function that it wraps in its closure."""
    if not isinstance(function, FunctionType):
        return None
    namespace, closure = function.__globals__, function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        if name not in function.__code__.co_names:
            return None
        namespace = {**namespace, name: value}
    else:
        inner = with_global(wrapped, name, value)
        cells = closure or ()
        if inner is None or not any(cell.cell_contents is wrapped for cell in cells):
            return None
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class FusedModule(nn.Module):
    """Base of the classes that fused modules are given. In theirs, `super().forward` is the original."""

    fused: Any
    """What `forward` needs besides the module itself."""


@dataclass(frozen=True, slots=True)
class Change:
    module: nn.Module
    into: type[FusedModule]
    fused: Any = None


def make_changes(changes: Iterable[Change]) -> None:
    classes: dict[tuple[type[FusedModule], type[nn.Module]], type[nn.Module]] = {}
    for change in changes:
        into, original = change.into, type(change.module)
        if (into, original) not in classes:
            classes[into, original] = type(f"Fused{original.__name__}", (into, original), {})
        change.module.__class__ = classes[into, original]
        change.module.fused = change.fused


class Handed:
    """A result that one module computes for another: for one input, to be used once."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._result: Tensor | None = None

    def leave(self, x: Tensor | None, result: Tensor | None) -> None:
        self._input, self._result = x, result

    def take(self, x: Tensor) -> Tensor | None:
        if self._input is not x:
            return None
        result, self._input, self._result = self._result, None, None
        return result


def agree(a: Tensor, b: Any) -> bool:
    """Whether two tensors are equal up to a few rounding errors at the scale of the tensor's RMS value."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    step = 4 * max(torch.finfo(b.dtype).eps, 1e-5)
    scale = b.double().pow(2).mean().sqrt().item()
    return torch.allclose(a.double(), b.double(), rtol=step, atol=step * scale)
