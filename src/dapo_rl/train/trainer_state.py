"""The progress of a run: its step, evaluations, token counts and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dapo_rl.base.saved import Count, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.train.ledger import Ledger

FILE = "progress.json"


class SavedProgress(Saved):
    step: Count
    wall_seconds: Annotated[float, Field(ge=0, le=1e12)]
    evaluations: list[Annotated[list[float], Field(min_length=2, max_length=2)]]
    ledger: dict[str, Count]
    metrics: dict[str, int | float | None]
    evaluation_due: bool = False
    pretrained: Count | None = None

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        for at, share in self.evaluations:
            yield "evaluations", not 0 <= at <= self.step or at != int(at)
            yield "evaluations", share == share and not 0 <= share <= 1


@dataclass(slots=True)
class Progress:
    step: int = 0
    wall_seconds: float = 0.0
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out accuracy); step 0 is before the first update."""
    ledger: Ledger = field(default_factory=Ledger)
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the last step."""
    evaluation_due: bool = False
    """Whether the last step is still to be evaluated, and its metrics to be logged: a stop came first."""
    pretrained: int | None = None
    """The steps of value pre-training, if it ended early, by `critic.pretrain_until`."""
    current: int = 0
    """The step in progress, or the last one done. It is not saved."""
    failed: Ledger | None = None
    """The ledger with the step in which the run failed. It is not saved."""

    def is_done(self, steps: int) -> bool:
        """Whether the last of all steps has been made and logged."""
        return self.step == steps and not self.evaluation_due

    @property
    def logged(self) -> int:
        return self.step - self.evaluation_due

    def save(self, directory: Path) -> None:
        state = {
            "step": self.step,
            "wall_seconds": self.wall_seconds,
            "evaluations": self.evaluations,
            "ledger": self.ledger.state(),
            "metrics": self.metrics,
            "evaluation_due": self.evaluation_due,
            **({} if self.pretrained is None else {"pretrained": self.pretrained}),
        }
        write_state(directory / FILE, state)

    def load(self, directory: Path) -> None:
        path = directory / FILE
        with restoring(path):
            state = parse_state(SavedProgress, read_state(path))
        self.step, self.wall_seconds = state.step, state.wall_seconds
        self.current = self.step
        self.evaluations = [(int(step), accuracy) for step, accuracy in state.evaluations]
        self.ledger = Ledger(state.ledger)
        self.evaluation_due, self.pretrained = state.evaluation_due, state.pretrained
        self.metrics = {name: float("nan") if value is None else value for name, value in state.metrics.items()}
