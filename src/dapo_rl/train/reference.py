"""A reference policy that follows the policy (`algo.ref_sync_steps`), and its weights in checkpoints of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.finite import not_finite
from dapo_rl.models.save import weight_difference

FILE = "reference.pt"


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


@torch.no_grad()
def restore_reference(reference: Any, stored: Mapping[str, Tensor]) -> None:
    own = reference.state_dict()
    for name, tensor in stored.items():
        own[name].copy_(tensor)
