"""The recipe `demo`, which `dapo train` runs without a recipe, and the settings of a run of a custom model or data.

The demo's settings suit its model and its sums only: without a recipe, another model or other data gets the preset's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_rl.config import Config, source_name
from dapo_rl.config.recipe import override, read_recipe
from dapo_rl.recipes import packaged_recipe

DEFAULT_RECIPE = packaged_recipe("demo")
"""The demo: the embedded model on arithmetic, without a network or a GPU."""
MODEL, DATA = ("model", "name"), ("data", "train", "source")
TINY_NEW_TOKENS = 256
"""`sampling.max_new_tokens` of the embedded model on other data: the default of 1024 exceeds its context of 512."""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where the settings of a run come from."""

    recipe: Path | None
    """None: the preset's defaults."""
    overrides: tuple[str, ...]
    custom: bool = False
    """Whether the command line names another model than the demo's or other data, and no recipe."""

    def load(self, *, needs_data: bool = True) -> Config:
        """The settings. With `needs_data`, a recipe, or a run of a custom model, must name its data."""
        config = Config.load(self.recipe, self.overrides)
        if needs_data:
            config.check_data(str(self.recipe or f"model.name={config.model.name}"))
        return config


def start_from(recipe: Path | None, overrides: Sequence[str]) -> StartingPoint:
    """The recipe; without one, the demo, or the defaults if the overrides change the demo's model or data."""
    if recipe is not None:
        return StartingPoint(recipe, tuple(overrides))
    demo = read_recipe(DEFAULT_RECIPE)
    model, data = _at(demo, *MODEL), _at(demo, *DATA)
    override(demo, overrides)
    same_model, same_data = _at(demo, *MODEL) == model, _at(demo, *DATA) == data
    if same_model and same_data:
        return StartingPoint(DEFAULT_RECIPE, tuple(overrides))
    if same_model:
        return StartingPoint(None, (f"sampling.max_new_tokens={TINY_NEW_TOKENS}", *overrides), custom=True)
    names_data = any(word.partition("=")[0].strip().startswith("data.train") for word in overrides)
    source = (f"data.train={data}",) if names_data and same_data else ()  # named by its parameters alone
    return StartingPoint(None, (*source, *overrides), custom=True)


def chosen_settings(config: Config) -> str:
    """One line with the main settings of a run that was started without a recipe, as they are changed."""
    settings = {
        "data.eval": source_name(config.data.eval),
        "sampling.prompts_per_step": config.sampling.prompts_per_step,
        "sampling.group_size": config.sampling.group_size,
        "sampling.max_new_tokens": config.sampling.max_new_tokens,
        "train.lr": f"{config.train.lr:g}",
        "train.steps": config.train.steps,
    }
    listed = " ".join(f"{key}={value}" for key, value in settings.items())
    return (
        f"{config.model.name} on {source_name(config.data.train)} with the defaults of preset={config.preset}, "
        f"not the demo's: {listed}; "
        "change any with key=value (`dapo train --help` lists them all)"
    )


def _at(settings: Any, *keys: str) -> Any:
    """The value below these keys, or above them the one that stands for the whole section."""
    for key in keys:
        settings = settings.get(key) if isinstance(settings, dict) else settings
    return settings
