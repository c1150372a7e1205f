"""Fuses the operations of a Hugging Face module into fewer kernels, for inference.

Projections of the same input become one product with a joint weight, and the module's parameters become views of it.
Norms, gated activations, the rotary embedding and residual sums go through `ops`. Each replacement is first compared
with the original, and skipped if the two differ by more than rounding.

`fuse(model)` changes the module for good, so an engine fuses its own copy of the trained module. Parameters keep their
names; new weights must be copied into them in place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from dapo_rl.engines.native.fuse.change import Change, FusedModule, make_changes
from dapo_rl.engines.native.fuse.layers import chain, fuse_layer
from dapo_rl.engines.native.fuse.linears import Join, fuse_head, fuse_projections, prepack_linears
from dapo_rl.engines.native.fuse.mlp import fuse_joint_mlp, fuse_mlp
from dapo_rl.engines.native.fuse.norms import FusedNorm, Norm, recognise_norm
from dapo_rl.engines.native.fuse.ops import Ops
from dapo_rl.engines.native.fuse.rotary import fuse_rotary
from dapo_rl.engines.native.prepack import Prepacked


@dataclass(slots=True)
class Fused:
    """What was fused."""

    joins: list[Join] = field(default_factory=list)
    prepacked: list[Prepacked] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    changes: list[Change] = field(default_factory=list)

    def offer(self, what: str, changes: list[Change] | None) -> None:
        """Adds changes that agree with the module, and counts those that do not (None). An empty list means that
        there is nothing to change."""
        if changes is None or not all(change.possible() for change in changes):
            self.left[what] += 1
        elif changes:
            self.counts[what] += 1
            self.changes += changes

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


def fuse(model: Any, ops: Ops | None = None, prepack: bool = False) -> Fused:
    """Changes the module in place. By default `ops` are the kernels on a CUDA device; elsewhere only projections are
    fused. `prepack` is for CPUs."""
    if any(isinstance(module, FusedModule) for module in model.modules()):
        raise RuntimeError("the module is already fused")
    some = next(model.parameters())
    if ops is None and some.device.type == "cuda":
        from dapo_rl.engines.native import kernels

        ops = kernels
    fused = Fused()
    # A joint weight is an inference tensor only if the parameters are: other parameters may be trained.
    with torch.inference_mode(some.is_inference()), torch.no_grad():
        for module in model.modules():
            if {"gate_proj", "up_proj", "down_proj"} <= module._modules.keys():
                fused.offer("MLP", fuse_mlp(module, ops, fused.joins))
            elif {"gate_up_proj", "down_proj"} <= module._modules.keys() and ops is not None:
                fused.offer("MLP", fuse_joint_mlp(module, ops))
            elif {"q_proj", "k_proj", "v_proj"} <= module._modules.keys():
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
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), torch.Tensor):
            norm = recognise_norm(module, ops)
            fused.offer("norm", None if norm is None else [Change(module, FusedNorm, norm)])
            if norm is not None:
                norms[module] = norm
    for layer, following in chain(model):
        fused.offer("layer", fuse_layer(layer, norms, following))
    fused.offer("head", fuse_head(model))
    attentions: dict[type, list[Any]] = {}
    for module in model.modules():
        if hasattr(module, "head_dim"):
            attentions.setdefault(type(module), []).append(module)
    for modules in attentions.values():
        fused.offer("rotary embedding", fuse_rotary(modules, ops))
