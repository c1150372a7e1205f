"""The files of this directory that a recipe names, which a job on another host needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.base.format import gib
from dapo_rl.base.home import expanded
from dapo_rl.choices import REWARD_MODEL, is_function, is_judge, is_reward_model
from dapo_rl.config import Config, entries_of
from dapo_rl.data.files import SUFFIXES
from dapo_rl.errors import UserError
from dapo_rl.recipes import packaged_name

MOST_BYTES = 256 << 20
"""Size limit of what is shipped; Ray's own is 500 MiB."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """A file here, and its path in the job's working directory."""

    key: str
    here: Path
    there: str


def files_to_ship(recipe: Path | None, config: Config, include: Sequence[str] = ()) -> list[Shipped]:
    """The recipe, and the files that settings name by a relative path. Absolute paths are paths of the cluster."""
    found: dict[str, Shipped] = {}
    if recipe is not None and packaged_name(recipe) is None:
        found[recipe_there(recipe)] = Shipped("the recipe", recipe, recipe_there(recipe))
    named = [(key, path) for key, path in _named(config) if not expanded(path).is_absolute()]
    for key, path in [*named, *(("--include", path) for path in include)]:
        for each in _inside(key, Path(path)):
            found.setdefault(each.there, each)
    size = sum(each.here.stat().st_size for each in found.values())
    if size > MOST_BYTES:
        largest = max(found.values(), key=lambda each: each.here.stat().st_size)
        raise UserError(
            f"{largest.key}: the files to ship have {gib(size)}, more than {gib(MOST_BYTES)}; put {largest.there} on a "
            "file system of the cluster and give its absolute path"
        )
    return list(found.values())


def recipe_there(recipe: Path) -> str:
    outside = recipe.is_absolute() or ".." in recipe.parts or recipe.parts[:1] == ("~",)
    return recipe.name if outside else recipe.as_posix()


def copy_to(directory: Path, files: Sequence[Shipped]) -> None:
    for each in files:
        target = directory / each.there
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(each.here, target)


def _named(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that may name a file, and the path."""
    for key, source in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for entry in entries_of(source):
            if entry.source.lower().endswith(SUFFIXES):
                yield key, entry.source
    functions = [
        ("algo.loss", config.algo.loss),
        ("algo.advantage", config.algo.advantage),
        ("sampling.filter", config.sampling.filter or ""),
        ("engine", config.engine),
        ("env.name", config.env.name or ""),
        ("env.agent", config.env.agent or ""),
        *(("env.tools", name) for name in config.env.tools),
        *(("train.transforms", name) for name in config.train.transforms),
    ]
    verifiers = [("reward.verifier", entry.verifier) for entry in config.reward.verifiers]
    for key, name in verifiers:
        path = name.removeprefix(REWARD_MODEL)
        if is_judge(name) or (is_reward_model(name) and Path(path).is_dir()):
            yield key, path
    for key, name in [*functions, *verifiers]:
        where = name.rpartition(":")[0]
        file = where if where.endswith(".py") else _module_here(where)
        if is_function(name) and not is_reward_model(name) and file:
            yield key, file
    models = {"model.name": config.model.name, "teacher.name": config.teacher.name, "critic.model": config.critic.model}
    yield from ((key, name) for key, name in models.items() if name is not None and Path(name).is_dir())
    yield from (("env.tls", path) for path in config.env.tls or ())


def _module_here(name: str) -> str | None:
    """The file or package in the working directory that has a module; None for one that is installed."""
    first = name.partition(".")[0]
    there = (path for path in (f"{first}.py", first) if first and Path(path).exists())
    return next(there, None)


def _inside(key: str, path: Path) -> Iterator[Shipped]:
    """The file, or the files of a directory, in the working directory; raises if it is not there or not inside."""
    place = Path(os.path.normpath(path))
    if place.is_absolute() or ".." in place.parts:
        raise UserError(f"{key}: {path} is outside of the working directory, and only files inside of it are shipped")
    if place.is_dir():
        inside = (Path(folder) / name for folder, _, names in os.walk(place) for name in names)
        yield from (Shipped(key, each, each.as_posix()) for each in sorted(inside))
    elif place.is_file():
        yield Shipped(key, place, place.as_posix())
    else:
        raise UserError(f"{key}: {path}: no such file (from {Path.cwd()})")
