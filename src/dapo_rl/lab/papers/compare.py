"""Compares a recipe with a paper, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from dapo_rl.config import Config

Kind = Literal["algorithm", "settings", "evaluation"]
"""A technique that is on or off, a value, or how accuracy is measured."""

Finding = tuple[str, bool, str]
"""The recipe's value, whether it matches the paper, and what that means."""

Find = Callable[[Config], Finding | None]
"""None: the recipe's other settings make the row meaningless."""


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
class Row:
    kind: Kind
    name: str
    reference: str
    paper: str
    """The paper's value."""
    keys: tuple[str, ...]
    """The settings that `find` reads."""
    find: Find
    without: int | None = None
    """The score of the paper's run without it, if the paper has such an ablation."""

    def at(self, reference: str, **changes: Any) -> Row:
        """The row as another paper has it."""
        return replace(self, reference=reference, **changes)


def row(
    kind: Kind,
    name: str,
    reference: str,
    paper: str,
    settings: str,
    *,
    without: int | None = None,
    needs_critic: bool = False,
) -> Callable[[Find], Row]:
    """Makes a row of a function. `settings` are its keys, separated by spaces. A row that needs a critic is left out
    for a recipe without one."""

    def make(find: Find) -> Row:
        def if_critic(config: Config) -> Finding | None:
            return find(config) if config.has_critic else None

        return Row(kind, name, reference, paper, tuple(settings.split()), if_critic if needs_critic else find, without)

    return make


def same(recipe: str, remark: str = "") -> Finding:
    return recipe, True, remark


def differs(recipe: str, *effects: str | bool) -> Finding:
    """The effects of differences from the paper; those that are not present are False. Without any, it is the same."""
    present = [effect for effect in effects if isinstance(effect, str)]
    return recipe, not present, "; ".join(present)


def unused(name: str, settings: str, meaning: str) -> Row:
    """A row for settings that no paper uses: it appears if a recipe changes one of them from its default."""
    keys = tuple(settings.split())

    def find(config: Config) -> Finding | None:
        found = {key: value for key in keys if (value := _value(config, key)) != _value(Config(), key)}
        nested = {key for key in found if any(key.startswith(f"{other}.") for other in found)}
        words = [f"{key.split('.', 1)[-1]} {_shown(value)}" for key, value in found.items() if key not in nested]
        return differs(", ".join(words), meaning) if found else None

    return Row("settings", name, "not in it", "none", keys, find)


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
    rows: tuple[Row, ...]
    without_effect: tuple[str, ...] = ()
    """Settings that do nothing in its algorithm."""

    def compare(self, config: Config) -> tuple[Comparison, ...]:
        """Every row, except those that the recipe's other settings make meaningless."""
        found = []
        for row in self.rows:
            if (finding := row.find(config)) is not None:
                recipe, is_same, meaning = finding
                if not is_same and row.without is not None:
                    meaning += (
                        f"; the paper's run without it has {row.without} instead of {self.score:.0f} on AIME 2024"
                    )
                about = (row.name, row.reference, row.kind, row.keys, row.paper)
                found.append(Comparison(*about, recipe, is_same, meaning))
        return tuple(found)


def times_the_paper(value: float, paper: float) -> str:
    if value >= paper:
        return f"{value / paper:.3g} times the paper's"
    share = paper / value
    return f"1/{share:.0f} of the paper's" if share >= 2 else f"{value / paper:.0%} of the paper's"
