"""Compares a recipe with DAPO's and VAPO's papers. What they specify is a table of rows, `rows.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.papers.facts import RecipeFacts

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
class PaperRow:
    name: str
    reference: str
    paper: str
    settings: str
    """The keys that it reads, separated by spaces."""
    kind: Kind = "settings"
    cases: tuple[Mapping[str, Any], ...] = ()
    value: str | None = None
    """The name of the value that is compared with `number`; by default the first setting."""
    number: float | None = None
    """The paper's value, where the comparison is with a number."""
    without: int | None = None
    """The score of the paper's run without it, if the paper has such an ablation."""

    @classmethod
    def read(cls, name: str, fields: Mapping[str, Any]) -> PaperRow:
        """A row without `cases` is its own only case."""
        case = {key: fields[key] for key in ("recipe", "effects") if key in fields}
        others = {key: value for key, value in fields.items() if key not in case}
        return cls(name=name, cases=tuple(others.pop("cases", [case])), **others)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.settings.split())

    def find(self, config: Config) -> Finding | None:
        """None if the recipe's other settings make the row meaningless."""
        value = RecipeFacts(config)[self.value or self.keys[0]]
        facts = RecipeFacts(config, {"value": value, "number": self.number, "paper": self.paper})
        case = next(case for case in self.cases if facts.hold(case.get("if", "always")))
        if "recipe" not in case:
            return None
        effects = {"always": case["differs"]} if "differs" in case else case.get("effects", {})
        present = [facts.text(effect) for condition, effect in effects.items() if facts.hold(condition)]
        return facts.text(case["recipe"]), not present, "; ".join(present) or facts.text(case.get("remark", ""))


@dataclass(frozen=True, slots=True)
class UnusedRow(PaperRow):
    """Settings that no paper uses: the row appears if a recipe changes one of them from its default."""

    effect: str = ""

    def find(self, config: Config) -> Finding | None:
        here, default = RecipeFacts(config), RecipeFacts(Config())
        found = {key: value for key in self.keys if (value := here[key]) != default[key]}
        nested = {key for key in found if any(key.startswith(f"{other}.") for other in found)}
        words = [f"{key.split('.', 1)[-1]} {_shown(value)}" for key, value in found.items() if key not in nested]
        return (", ".join(words), False, self.effect) if found else None


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
    rows: tuple[PaperRow, ...]
    without_effect: str = ""
    """Settings that do nothing in its algorithm, separated by spaces."""

    def compare(self, config: Config) -> tuple[Comparison, ...]:
        found = []
        for row in self.rows:
            if (finding := row.find(config)) is not None:
                recipe, same, meaning = finding
                if not same and row.without is not None:
                    meaning += (
                        f"; the paper's run without it has {row.without} instead of {self.score:.0f} on AIME 2024"
                    )
                about = (row.name, row.reference, row.kind, row.keys, row.paper)
                found.append(Comparison(*about, recipe, same, meaning))
        return tuple(found)


def _read_papers() -> tuple[dict[str, Paper], dict[str, str]]:
    """The papers, and the settings that are irrelevant to a comparison, by the reason."""
    text = (Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the one in C is ten times as fast
    unused = [UnusedRow(name, "not in it", "none", **fields) for name, fields in table.pop("unused").items()]
    irrelevant, inherited = table.pop("irrelevant"), table["dapo"]["rows"]
    papers = {}
    for name, paper in table.items():
        rows = [PaperRow.read(row, inherited.get(row, {}) | fields) for row, fields in paper.pop("rows").items()]
        papers[name] = Paper(rows=(*rows, *unused), **paper)
    return papers, irrelevant


PAPERS, IRRELEVANT = _read_papers()


def find_paper(config: Config, name: str | None = None) -> Paper:
    """The paper of that name; without one, VAPO's for a recipe with a critic, and DAPO's for any other."""
    if name is None:
        return PAPERS["vapo" if config.has_critic else "dapo"]
    try:
        return PAPERS[name.lower()]
    except KeyError:
        hint = did_you_mean(nearest(name.lower(), PAPERS))
        raise UserError(f"--paper: {shown(name)} is not one of {', '.join(PAPERS)}{hint}") from None
