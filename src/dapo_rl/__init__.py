"""Reinforcement learning with verifiable rewards for language models, by DAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dapo_rl.config import Config
from dapo_rl.errors import DivergedError, UserError
from dapo_rl.version import __version__

if TYPE_CHECKING:
    from dapo_rl.trainer import DAPOTrainer

__all__ = ["Config", "DAPOTrainer", "DivergedError", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    # The trainer brings torch and transformers along; the settings and the board do without them.
    if name == "DAPOTrainer":
        from dapo_rl.trainer import DAPOTrainer

        return DAPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
