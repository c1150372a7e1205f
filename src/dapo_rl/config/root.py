"""`Config`: the settings of a run, read from recipes, mappings and the command line, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from dapo_rl.choices import NO_VERIFIER
from dapo_rl.config.conflicts import conflicts
from dapo_rl.config.presets import PRESETS
from dapo_rl.config.recipe import explain, nested, override, read_recipe
from dapo_rl.config.section import Section
from dapo_rl.config.sections import LoraSettings
from dapo_rl.config.settings import RunSettings
from dapo_rl.errors import UserError
from dapo_rl.recipes import find_recipe


class Config(RunSettings):
    """All settings of a run. Frozen; settings that contradict each other are refused."""

    @model_validator(mode="after")
    def _reject_conflicts(self) -> Config:
        if line := next(conflicts(self), None):
            raise ValueError(line)
        return self

    def check_conflicts(self) -> None:
        """Raises UserError for settings that contradict each other, after a change that is not validated."""
        if line := next(conflicts(self), None):
            raise UserError(line)

    @classmethod
    def load(cls, recipe: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
        """Settings of a recipe, a file or a name (None: the defaults), with `key=value` overrides."""
        return cls.override(read_recipe(find_recipe(recipe)) if recipe is not None else {}, overrides)

    def check_data(self, where: str) -> None:
        """Raises UserError if `data.train` is not set, so that no run of something else falls back to the demo's sums;
        `where` is what leaves it out."""
        if "train" not in self.data.model_fields_set:
            raise UserError(
                f"{where}: data.train is not set; name what to train on, for example data.train=train.parquet "
                "(data.train=arithmetic: the demo's sums)"
            )

    @classmethod
    def override(cls, settings: dict[str, Any], overrides: Iterable[str]) -> Config:
        """Nested settings, with `key=value` overrides."""
        override(settings, overrides)
        return cls.build(settings)

    @classmethod
    def build(cls, settings: Mapping[str, Any]) -> Config:
        """Settings from a mapping, nested or with dotted keys; the preset supplies those that it does not set."""
        try:
            sections = nested(settings)
            preset = sections.get("preset", "dapo")
            for section, changes in PRESETS.get(str(preset), {}).items():
                given = sections.setdefault(section, {})
                if isinstance(given, dict):
                    sections[section] = {**changes, **given}
            _judge_by_environment(sections)
            return cls.model_validate(sections)
        except ValidationError as error:
            raise UserError(explain(error, known_keys())) from None
        except RecursionError:
            raise UserError("settings: nested too deeply; a key is written section.name") from None


def _judge_by_environment(sections: dict[str, Any]) -> None:
    """Leaves the rewards to an environment that gives them, unless a verifier is named."""
    environment, reward = sections.get("env"), sections.get("reward", {})
    if isinstance(environment, dict) and isinstance(reward, dict):
        gives = any(environment.get(name) not in (None, "none") for name in ("name", "agent"))
        if gives and "verifier" not in reward:
            sections["reward"] = {**reward, "verifier": NO_VERIFIER}


def known_keys() -> dict[str, Any]:
    """Every dotted key with its pydantic field, in order of definition."""
    keys: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.default, Section):
            for inner, inner_field in type(field.default).model_fields.items():
                keys[f"{name}.{inner}"] = inner_field
                if inner_field.annotation == LoraSettings | None:
                    keys |= {f"{name}.{inner}.{key}": f for key, f in LoraSettings.model_fields.items()}
        else:
            keys[name] = field
    return keys
