"""What a paper specifies, component by component, and how a recipe compares with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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

    kind: Kind
    name: str
    reference: str
    paper: str
    """The paper's value."""
    find: Callable[[Config], Finding | None]
    """None: the recipe's other settings make the row meaningless."""
    settings: str
    """The keys that it reads, separated by spaces."""
    without: int | None = None
    """The score of the paper's run without it, if the paper has such an ablation."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.settings.split())


def unused(name: str, settings: str, meaning: str) -> Component:
    """A row for settings that no paper uses: it appears if a recipe changes one of them from its default."""
    find = partial(_changed, keys=tuple(settings.split()), meaning=meaning)
    return Component("settings", name, "not in it", "none", find, settings)


def _changed(config: Config, *, keys: tuple[str, ...], meaning: str) -> Finding | None:
    found = {key: value for key in keys if (value := _value(config, key)) != _value(Config(), key)}
    if not found:
        return None
    nested = {key for key in found if any(key.startswith(f"{other}.") for other in found)}
    words = [f"{key.split('.', 1)[-1]} {_shown(value)}" for key, value in found.items() if key not in nested]
    return ", ".join(words), False, meaning


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _shown(value: Any) -> str:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else repr(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Paper:
    name: str
    arxiv: str
    score: float
    """Accuracy on AIME 2024, in percent."""
    components: tuple[Component, ...]
    without_effect: str = ""
    """Settings that do nothing in its algorithm, separated by spaces."""

    def compare(self, config: Config) -> tuple[Comparison, ...]:
        """Every component, except those that the recipe's other settings make meaningless."""
        rows = (self._row(component, config) for component in self.components)
        return tuple(row for row in rows if row is not None)

    def row(self, name: str, reference: str, **changes: Any) -> Component:
        """The component of this name, as another paper has it."""
        (component,) = (component for component in self.components if component.name == name)
        return replace(component, reference=reference, **changes)

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
