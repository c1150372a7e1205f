"""The checkpoint part that saves what reward functions are told of the run's progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rewards.state import RewardState

FILE = "rewards.json"


class SavedRewards(Saved):
    step: Count
    epoch: Annotated[float, Field(ge=0, le=1e12)]


@dataclass(frozen=True, slots=True)
class SavedRewardState:
    """A step that was interrupted continues with the epoch in which it began, and so does an evaluation."""

    verifier: VerifierPool
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
