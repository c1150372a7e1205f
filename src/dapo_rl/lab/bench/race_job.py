"""The work of one contender of `bench race`, for a separate process."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_rl.config import Config


@dataclass(frozen=True, slots=True)
class RaceJob:
    contender: str
    """`dapo` or `trl`."""
    recipe: str
    settings: tuple[str, ...]
    seed: int
    steps: int
    every: int
    """Steps between evaluations."""
    variant: str = ""
    weights: str = ""
    """Where contenders save weights, in a folder for each step that is evaluated."""

    def config(self, *more: str) -> Config:
        own = (f"seed={self.seed}", f"train.steps={self.steps}", f"eval.every={self.every}")
        quiet = (f"checkpoint.every={self.steps + 1}", "checkpoint.save_final=false", "log.rollouts=false")
        return Config.load(self.recipe, [*self.settings, *own, *quiet, *more])

    @property
    def evaluated(self) -> list[int]:
        """The steps after which the policy is evaluated."""
        return sorted({0, *range(self.every, self.steps, self.every), self.steps})
