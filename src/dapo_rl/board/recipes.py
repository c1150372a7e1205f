"""The recipes that the Lab offers: those in the folders near the runs, and those of the package.

The page chooses one by its name in the list. A name is never used as a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.board.contents import read_settings
from dapo_rl.board.files import Identity, Remembered, identity
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
        self._known: dict[str, tuple[Identity | None, str | None]] = {}

    def offered(self) -> dict[str, OfferedRecipe]:
        """The recipes by name: those of the package, the demo first, and the files in the folders."""
        packaged = [DEMO, *(name for name in recipe_names() if name != DEMO)]
        found = {name: OfferedRecipe(name, packaged_recipe(name), None) for name in packaged}
        for label, folder in self._folders:
            for path in _files(folder):
                name = f"{label}/{_shown(path.name)}"
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

    def _problem(self, path: Path, folder: Path) -> str | None:
        now = identity(str(path))
        known = self._known.get(str(path))
        if known is None or known[0] != now:
            reader = Remembered(str(path), os.path.realpath(folder), read_settings)
            read = reader.look()
            why = reader.problem or (read[2] if read else "is not a file")
            if "=" in str(path):
                why = "its path contains =, so it would be read as a setting; rename it"
            known = self._known[str(path)] = (now, problem_line(why) if why else None)
        return known[1]


def _folders(roots: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Each folder with the name it has in the list: the served ones, and `recipes` in and beside them."""
    seen = set()
    for root in roots:
        here = root.absolute()
        for folder in (here, here / FOLDER, here.parent / FOLDER):
            real = os.path.realpath(folder)
            if real not in seen:
                seen.add(real)
                yield _shown(os.path.basename(real)), folder


def _files(folder: Path) -> list[Path]:
    """The YAML files of a folder, without those in its subfolders and without the settings of a run."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(ENDINGS)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name != "config.yaml" and not name.startswith(".")]


def _shown(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")
