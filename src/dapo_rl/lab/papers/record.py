"""What a paper specifies, component by component, and how a recipe compares with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dapo_rl.config import Config

Kind = Literal["algorithm", "settings", "evaluation"]
"""A technique that is on or off, a value, or how accuracy is measured."""

Finding = tuple[str, bool, str]
"""The recipe's value, whether it matches the paper, and what that means."""


@dataclass(frozen=True, slots=True)
class Comparison:
    component: str
    reference: str
    """Where the paper specifies it, or where else it comes from."""
    kind: Kind
    keys: tuple[str, ...]
    paper: str
    recipe: str
    same: bool
    meaning: str = ""
    """The effect of the difference on the run, or why an apparent difference is not one."""


@dataclass(frozen=True, slots=True)
class Component:
    """One row of the report."""

    name: str
    reference: str
    kind: Kind
    paper: str
    """The paper's value."""
    find: Callable[[Config], Finding | None]
    """None: the recipe's other settings make the row meaningless."""
    keys: tuple[str, ...]
    without: int | None = None
    """The score of the paper's run without it, if the paper has such an ablation."""


@dataclass(frozen=True, slots=True)
class Paper:
    name: str
    arxiv: str
    score: float
    """Accuracy on AIME 2024, in percent."""
    components: tuple[Component, ...]

    def compare(self, config: Config) -> tuple[Comparison, ...]:
        """Every component, except those that the recipe's other settings make meaningless."""
        rows = (self._row(component, config) for component in self.components)
        return tuple(row for row in rows if row is not None)

    def _row(self, component: Component, config: Config) -> Comparison | None:
        finding = component.find(config)
        if finding is None:
            return None
        recipe, same, meaning = finding
        if not same and component.without is not None:
            meaning += f"; the paper's run without it has {component.without} instead of {self.score:.0f} on AIME 2024"
        return Comparison(
            component.name, component.reference, component.kind, component.keys, component.paper, recipe, same, meaning
        )


def times_the_paper(value: float, paper: float) -> str:
    if value >= paper:
        return f"{value / paper:.3g} times the paper's"
    share = paper / value
    return f"1/{share:.0f} of the paper's" if share >= 2 else f"{value / paper:.0%} of the paper's"
