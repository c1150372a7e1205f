"""The tables of techniques that `dapo ablate --table` runs, as `techniques.yaml` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml

from dapo_rl.config import Config
from dapo_rl.config.recipe import flat
from dapo_rl.lab.papers.facts import RecipeFacts

Part = Literal["ladder", "leave-one-out", "vary"]


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique of a table; techniques.yaml explains the fields."""

    name: str
    on: Mapping[str, Any]
    off: Mapping[str, Any]
    when: str
    meaning: str
    paper: int | None = None
    paper_without: int | None = None

    def is_on(self, config: Config) -> bool:
        return RecipeFacts(config).hold(self.when)

    def settings(self, base: Config, on: bool) -> dict[str, Any]:
        """The settings to change in a recipe to switch the technique on or off."""
        if on:
            return {} if self.is_on(base) else dict(self.on)
        own = flat(base.resolved())
        return {
            key: prod(own[factor] for factor in value["product"]) if isinstance(value, Mapping) else value
            for key, value in self.off.items()
        }


@dataclass(frozen=True, slots=True)
class PaperTable:
    """The rows of a paper's table; techniques.yaml explains the fields."""

    whole: str
    baseline: str
    techniques: tuple[Technique, ...]
    figures: str
    baseline_paper: int | None = None
    whole_paper: int | None = None
    parts: tuple[Part, ...] = ("ladder", "leave-one-out")
    preset: str | None = None


def _read_tables() -> dict[str, PaperTable]:
    text = (Path(__file__).parent / "techniques.yaml").read_text(encoding="utf-8")
    tables = {}
    for name, fields in yaml.safe_load(text).items():
        techniques = tuple(Technique(each, **row) for each, row in fields.pop("techniques").items())
        tables[name] = PaperTable(techniques=techniques, **fields)
    return tables


TABLES = _read_tables()
DEFAULT_TABLE = "dapo"
TECHNIQUES = TABLES[DEFAULT_TABLE].techniques
