"""The frozen model that samples are scored by; it may follow the policy (`algo.ref_sync_steps`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_rl.config import Config
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.finite import not_finite
from dapo_rl.models.lora import has_lora, is_adapted, merged_copy
from dapo_rl.models.save import weight_difference
from dapo_rl.train.teacher import load_teacher

FILE = "reference.pt"


def build_reference(model: Any, tokenizer: Any, config: Config, teacher_device: str | None) -> Any:
    """The frozen model that samples are scored by, besides the policy: a teacher, or a copy of the policy. A policy
    whose adapters are new contains its own. None if the run needs none."""
    if config.teacher.loaded:
        return load_teacher(config, tokenizer, teacher_device)
    if not config.needs_reference:
        return None
    if has_lora(model):
        return merged_copy(model) if is_adapted(model) else model
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def move_towards(reference: Any, model: Any, alpha: float) -> None:
    """`reference ← alpha · model + (1 − alpha) · reference`, in place. With 1, it is the model bit for bit."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        if alpha == 1:
            old.copy_(new)
        else:
            old.mul_(1 - alpha).add_(new, alpha=alpha)


def check_reference(directory: Path, reference: Any, stored: Mapping[str, Tensor]) -> None:
    """Raises if the weights of a checkpoint cannot be those of the reference."""
    if name := not_finite(stored):
        raise NonFiniteError(f"the weights of its reference policy are not finite, in {name}")
    if other := weight_difference(reference.state_dict(), stored):
        raise UserError(f"{directory}: has the reference policy of another model: {other}; resume with the run's own")
