"""The Lab: runs of a recipe with settings changed, started, queued and stopped from the page.

It offers the recipes of the package and those in the folders near the runs. The page chooses one by its name in the
list; a name is never used as a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.board.files import LARGEST_CONFIG, Remembered, load_yaml, read_all, read_settings, shown_name
from dapo_rl.board.job_queue import JobQueue
from dapo_rl.board.run import problem_line
from dapo_rl.config import Config, known_keys
from dapo_rl.config.recipe import parse_value
from dapo_rl.demo import DEFAULT_RECIPE
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.recipes import packaged_recipe, recipe_names
from dapo_rl.runs.resume import override_word

FOLDER = "recipes"
ENDINGS = (".yaml", ".yml")
MOST_RECIPES = 200
DEMO = "demo"
PROMPTS = 128
LONGEST_VALUE = 2000
OWN_CODE = (
    *("engine", "algo.loss", "algo.advantage", "reward.verifier", "sampling.filter"),
    *("env.name", "env.tools", "train.transforms"),
)
"""Settings that can name a Python function, `module:name` or `file.py:name`."""
RECIPES_ALONE = {
    "env.mcp": "commands are",
    "env.agent": "a command is",
    "engine_options": "options of an engine are",
    "teacher.api_key_env": "a variable with a key is",
    "cluster.address": "a cluster is",
}
"""Settings that can name any code or secret of this host."""
UNSET = ("", "[]", "{}", "null", "none")
NAMED = re.compile(r":\S|\.py")


class Start(BaseModel):
    """The settings that the page may choose; all others are those of the recipe."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str = Field(DEMO, max_length=1000)
    techniques: list[str] = Field(max_length=len(TECHNIQUES))
    steps: int = Field(40, ge=1, le=1_000_000)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    eval_prompts: int | None = Field(PROMPTS, ge=1, le=100_000)
    """None: those of the recipe."""
    settings: dict[str, str] = Field({}, max_length=200)
    """Other settings by key, with their values as on the command line."""


class Launcher:
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
            "settings": _described(base),
            "steps": base.train.steps,
            "seed": base.seed,
            "eval_prompts": PROMPTS if recipe == DEMO else base.eval.prompts,
            "jobs": self.queue.listed(),
        }

    def start(self, wanted: Start) -> str:
        """Starts a run, or queues it if one is in progress; returns its name."""
        path, overrides = self.check(wanted)
        return self.queue.add(wanted.recipe, [*([] if wanted.recipe == DEMO else [str(path)]), *overrides])

    def check(self, wanted: Start) -> tuple[Path, list[str]]:
        """The recipe and the overrides of a choice. Raises a UserError for a mistake, before anything starts."""
        path, base = self.menu.load(wanted.recipe)
        overrides = overrides_for(wanted, base)
        Config.load(path, overrides)
        return path, overrides


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
    for key, value in wanted.settings.items():
        _check_setting(key, value)
    teacher = wanted.settings.get("teacher.name", "").strip()
    if base.teacher.api_key_env is not None and teacher not in (*UNSET, base.teacher.name):
        raise UserError("teacher.name: another server would get the recipe's key; name it in a recipe, not here")
    return _words(changes | wanted.settings)


def _check_setting(key: str, value: str) -> None:
    if key not in known_keys():
        raise UserError(f"{key[:100]!r} is not a setting{did_you_mean(nearest(key, known_keys()))}")
    if len(value) > LONGEST_VALUE:
        raise UserError(f"{key}: longer than {LONGEST_VALUE} characters")
    # The token lets its holder start runs, not run code of their choice.
    # As it is written, and as YAML reads it: "evil\x3af" is evil:f.
    if key in OWN_CODE and (NAMED.search(value) or NAMED.search(str(parse_value(key, value)))):
        raise UserError(f"{key}: functions of your own are named in a recipe, not here")
    if key in RECIPES_ALONE and value.strip() not in UNSET:
        raise UserError(f"{key}: {RECIPES_ALONE[key]} named in a recipe, not here")


def _described(base: Config) -> list[dict[str, Any]]:
    """Every setting with its value in the recipe and its documentation."""
    values, described = base.resolved(), []
    for key, field in known_keys().items():
        value: Any = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        named = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
        choices = ["true", "false"] if isinstance(value, bool) else named
        meaning = " ".join((field.description or "").split())
        described.append({"key": key, "value": override_word(value), "choices": choices, "meaning": meaning})
    return described


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={override_word(value)}" for key, value in settings.items()]


@dataclass(frozen=True, slots=True)
class OfferedRecipe:
    name: str
    path: Path
    problem: str | None
    """Why it cannot be started, in one line."""


class RecipeMenu:
    def __init__(self, roots: Sequence[Path]) -> None:
        self._folders = list(_folders(roots))
        self._settings: dict[Path, Remembered] = {}
        self._sections: dict[Path, Remembered] = {}

    def offered(self) -> dict[str, OfferedRecipe]:
        """The recipes by name: those of the package, the demo first, and the files in the folders."""
        packaged = [DEMO, *(name for name in recipe_names() if name != DEMO)]
        found = {name: OfferedRecipe(name, packaged_recipe(name), None) for name in packaged}
        for label, folder, recipes_only in self._folders:
            for path in _files(folder):
                if recipes_only and not self._is_recipe(path):
                    continue
                name = f"{label}/{shown_name(path.name)}"
                while name in found:
                    name += "'"
                if len(found) <= MOST_RECIPES:
                    found[name] = OfferedRecipe(name, path, self._problem(path, folder))
        return found

    def load(self, name: str) -> tuple[Path, Config]:
        recipe = self.offered().get(name)
        if recipe is None:
            raise UserError(f"there is no recipe {name[:200]!r} here")
        if recipe.problem:
            raise UserError(f"{recipe.name}: {recipe.problem}")
        config = Config.load(recipe.path)
        config.check_data(recipe.name)
        return recipe.path, config

    def _is_recipe(self, path: Path) -> bool:
        """Whether a YAML file has sections of a recipe, right or wrong; a project's folder has other files too."""
        make = Remembered(str(path), os.path.realpath(path.parent), _sections_of)
        return bool(self._sections.setdefault(path, make).look())

    def _problem(self, path: Path, folder: Path) -> str | None:
        if "=" in str(path):
            return "its path contains =, so it would be read as a setting; rename it"
        file = self._settings.setdefault(path, Remembered(str(path), os.path.realpath(folder), read_settings))
        read = file.look()
        why = file.problem or (read[2] if read else "is not a file")
        return problem_line(why) if why else None


def _sections_of(path: str) -> set[str]:
    names = {str(key).partition(".")[0] for key in load_yaml(read_all(path, LARGEST_CONFIG))}
    return names & Config.model_fields.keys()


def _folders(roots: Sequence[Path]) -> Iterator[tuple[str, Path, bool]]:
    """Each folder with the name it has in the list: the served ones, `recipes` in and beside them, and the one around
    them, of which only recipes are listed."""
    seen = set()
    for root in roots:
        here = root.absolute()
        for folder in (here, here / FOLDER, here.parent / FOLDER, here.parent):
            real = os.path.realpath(folder)
            if real not in seen:
                seen.add(real)
                yield shown_name(os.path.basename(real)), folder, folder == here.parent


def _files(folder: Path) -> list[Path]:
    """The YAML files of a folder, without those in its subfolders and without the settings of a run."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(ENDINGS)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name != "config.yaml" and not name.startswith(".")]
