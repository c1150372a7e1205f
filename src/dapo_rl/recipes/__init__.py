"""The recipes of the package, by name: `dapo train NAME`, `dapo recipes`.

A recipe starts with a comment that says what it trains, and ends that comment with what was measured:

    # GSM8K with a model of 1.5 B parameters, on one GPU.
    #
    # Measured: one H200, 100 steps in 40 minutes: 55 % → 70 % of the test set.

It is a comment, so that it cannot change a run. Names are DATA-MODEL, with `-cpu` if the settings are for a CPU. The
experiments of docs/evidence.md are `lab/TECHNIQUE`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from dapo_rl.base.suggest import did_you_mean, nearest, nearest_path
from dapo_rl.errors import UserError

SUFFIX = ".yaml"
MEASURED = "Measured: "
_HOME = Path(__file__).parent


def recipe_names() -> list[str]:
    paths = (*_HOME.glob(f"*{SUFFIX}"), *_HOME.glob(f"lab/*{SUFFIX}"))
    return sorted(path.relative_to(_HOME).as_posix().removesuffix(SUFFIX) for path in paths)


def packaged_recipe(name: str) -> Path:
    if name not in recipe_names():
        raise UserError(f"{name}: no such recipe{_suggested(name)}")
    return _HOME / f"{name}{SUFFIX}"


def find_recipe(given: str | os.PathLike[str]) -> Path:
    """The file that a path or a name stands for; a path that exists comes first."""
    path = Path(given)
    if not os.path.lexists(path) and path.as_posix() in recipe_names():
        return packaged_recipe(path.as_posix())
    return path


def packaged_name(path: Path) -> str | None:
    """The name of a recipe of the package; None for another file."""
    name = path.relative_to(_HOME).as_posix().removesuffix(SUFFIX) if path.is_relative_to(_HOME) else None
    return name if name in recipe_names() else None


def split_arguments(words: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """The recipe among the arguments of a command, if there is one, and the overrides."""
    recipes = [word for word in words or () if "=" not in word]
    if len(recipes) > 1:
        raise UserError(f"two recipes, {recipes[0]} and {recipes[1]}; an override is written key=value")
    return (find_recipe(recipes[0]) if recipes else None), [word for word in words or () if "=" in word]


def no_such_recipe(path: Path) -> UserError:
    """The error for a path that does not exist and is no name either."""
    if close := nearest_path(path, lambda neighbour: neighbour.name.endswith(SUFFIX)):
        return UserError(f"{path}: no such recipe{did_you_mean(close)}")
    return UserError(f"{path}: no such recipe{_suggested(path.as_posix())}")


def _suggested(name: str) -> str:
    longer = [known for known in recipe_names() if name and known.startswith(name)]
    close = " or ".join(longer) or nearest(name, recipe_names())
    return f"{did_you_mean(close)} `dapo recipes` lists them all" if close else "; `dapo recipes` lists those there are"


def measured(text: str) -> str:
    """What the comment at the top of a recipe says was measured. Raises ValueError if it does not say it."""
    lines = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    starts = [at for at, line in enumerate(lines) if line.startswith(MEASURED)]
    if len(starts) != 1:
        raise ValueError(f"its comment has {len(starts)} lines that start with {MEASURED!r}, not one")
    return " ".join(lines[starts[0] :]).removeprefix(MEASURED)
