"""Replaces the forward passes of a Hugging Face module by fused ones, for the update under autocast.

Norms, the residual sums before them, gated activations and rotary embeddings are recognised by what they compute: a
replacement is used only if its results and gradients for random inputs are those of the module. The module's classes,
parameters and their names stay as they are, and outside `with fusion.active():` nothing is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dapo_rl.models.fused.check import ROUNDING, Forward, GradientCheck, forwards_replaced, has_its_own_forward
from dapo_rl.models.fused.layers import TrainedNorm, fused_layer, trained_norm
from dapo_rl.models.fused.projections import JointProjection, can_join, fused_mlp
from dapo_rl.models.fused.rotaries import ROTARY, RotaryReplacements


class TrainingFusion:
    """The replacements for one model."""

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
        check = GradientCheck(device, dtype)
        modules = [module for module in model.modules() if has_its_own_forward(module)]
        # Without the cache, because it would keep casts of all weights until the end.
        with torch.enable_grad(), torch.autocast(check.device.type, dtype, cache_enabled=False):
            norms = self._norms(modules, check)
            rotaries = RotaryReplacements(check)
            for module in modules:
                self._gather(module)
                parts = module._modules.keys()
                if {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"} <= parts:
                    self._offer("layer", module, fused_layer(module, norms, check))
                elif {"gate_proj", "up_proj", "down_proj"} <= parts or {"gate_up_proj", "down_proj"} <= parts:
                    self._offer("MLP", module, fused_mlp(module, check))
                elif isinstance(code := type(module).forward, FunctionType) and ROTARY in code.__code__.co_names:
                    self._offer("rotary embedding", module, rotaries.inside(module, code))
                if {"q_proj", "k_proj", "v_proj"} <= parts:
                    self._project([module.q_proj, module.k_proj, module.v_proj], check)
                for name in {"o_proj", "down_proj"} & parts:
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

    def _project(self, linears: Sequence[Any], check: GradientCheck) -> None:
        if not can_join(linears):
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

    def _norms(self, modules: Sequence[Any], check: GradientCheck) -> dict[nn.Module, TrainedNorm]:
        stacks = [m for m in modules if isinstance(getattr(m, "layers", None), nn.ModuleList)]
        last = {stack._modules.get("norm") for stack in stacks}
        norms: dict[nn.Module, TrainedNorm] = {}
        for module in modules:
            if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
                self._gather(module)
                norm = trained_norm(module, check)
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
