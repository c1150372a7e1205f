"""The progress of the run, for reward functions that depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardState:
    """The `trainer_state` of a reward function: the attributes of transformers' `TrainerState` that exist here."""

    global_step: int = 0
    """Steps that are complete: 0 in the first one."""
    max_steps: int = 0
    """`train.steps`."""
    epoch: float = 0.0
    """Passes over the training data so far, as a fraction, when the step began."""
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


AT_START = RewardState()
