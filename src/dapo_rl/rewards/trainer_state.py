"""The progress of the run, for reward functions that depend on it: TRL's `trainer_state`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state

FILE = "rewards.json"


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


class SavedRewards(Saved):
    step: Count
    epoch: Annotated[float, Field(ge=0, le=1e12)]


class HasState(Protocol):
    state: RewardState


@dataclass(frozen=True, slots=True)
class SavedRewardState:
    """The checkpoint part with the state of a verifier pool: an interrupted step, or evaluation, continues with the
    epoch in which it began."""

    verifier: HasState
    steps: int
    """`train.steps`, which may have changed since the checkpoint was written."""

    def save(self, directory: Path) -> None:
        state = self.verifier.state
        write_state(directory / FILE, {"step": state.global_step, "epoch": state.epoch})

    def load(self, directory: Path) -> None:
        path = directory / FILE
        if not path.exists():  # written by a version that does not interrupt steps
            return
        with restoring(path):
            state = parse_state(SavedRewards, read_state(path))
        self.verifier.state = RewardState(state.step, self.steps, state.epoch)
