"""The recipes that the Lab offers: those in the folders near the runs, and those of the package.

The page chooses one by its name in the list. A name is never used as a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.board.files import LARGEST_CONFIG, Remembered, load_yaml, read_all, read_settings, shown_name
from dapo_rl.board.run import problem_line
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.recipes import packaged_recipe, recipe_names

FOLDER = "recipes"
ENDINGS = (".yaml", ".yml")
MOST_RECIPES = 200
DEMO = "demo"


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
