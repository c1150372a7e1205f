"""The Lab: runs of a recipe with techniques switched on or off, started, queued and stopped from the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dapo_rl.board.jobs import JobQueue
from dapo_rl.board.recipes import DEMO, RecipeMenu
from dapo_rl.config import Config
from dapo_rl.demo import DEFAULT_RECIPE
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES

PROMPTS = 128
"""Held-out prompts of the demo."""


class Start(BaseModel):
    """The settings that the page may choose; all others are those of the recipe."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str = Field(DEMO, max_length=1000)
    techniques: list[str] = Field(max_length=len(TECHNIQUES))
    steps: int = Field(40, ge=1, le=1_000_000)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    eval_prompts: int | None = Field(PROMPTS, ge=1, le=100_000)
    """None: those of the recipe."""


class Lab:
    def __init__(self, directory: Path, roots: Sequence[Path] = ()) -> None:
        """`directory` is where runs are written; recipes are offered from `roots` and the folders beside them."""
        self.menu = RecipeMenu(roots or [directory])
        self.queue = JobQueue(directory)

    def describe(self, recipe: str = DEMO) -> dict[str, Any]:
        """The recipes, and the switches as set in one of them."""
        base = self.menu.load(recipe)[1]
        return {
            "recipes": [{"name": each.name, "problem": each.problem} for each in self.menu.offered().values()],
            "recipe": recipe,
            "model": base.model.name,
            "techniques": [
                {
                    "name": technique.name,
                    "on": technique.is_on(base),
                    "meaning": technique.meaning,
                    "settings": [
                        ", ".join(_words(shown)) for shown in (technique.settings(base, False), dict(technique.on))
                    ],
                }
                for technique in TECHNIQUES
            ],
            "steps": base.train.steps,
            "seed": base.seed,
            "eval_prompts": PROMPTS if recipe == DEMO else base.eval.prompts,
            "jobs": self.jobs(),
        }

    def jobs(self) -> list[dict[str, Any]]:
        return self.queue.listed()

    def start(self, wanted: Start) -> str:
        """Starts a run, or queues it if one is in progress; returns its name."""
        path, base = self.menu.load(wanted.recipe)
        overrides = overrides_for(wanted, base)
        Config.load(path, overrides)  # mistakes are found before anything starts
        return self.queue.add(wanted.recipe, [*([] if wanted.recipe == DEMO else [str(path)]), *overrides])

    def close(self) -> None:
        """Stops all runs in progress; each saves first."""
        self.queue.close()


def overrides_for(wanted: Start, base: Config | None = None) -> list[str]:
    """The command-line overrides for a choice; a technique that the recipe has as wanted keeps its settings."""
    unknown = set(wanted.techniques) - {technique.name for technique in TECHNIQUES}
    if unknown:
        raise UserError(f"there is no technique {sorted(unknown)[0]!r}")
    base = base or Config.load(DEFAULT_RECIPE)
    changes: dict[str, Any] = {}
    for technique in TECHNIQUES:
        on = technique.name in wanted.techniques
        if on != technique.is_on(base):
            changes |= technique.settings(base, on)
    changes |= {"train.steps": wanted.steps, "seed": wanted.seed}
    if wanted.eval_prompts is not None:
        changes["eval.prompts"] = wanted.eval_prompts
    return _words(changes)


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in settings.items()]
