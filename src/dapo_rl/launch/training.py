"""The `dapo train` command that a launch starts, checked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_rl.base.home import expanded
from dapo_rl.config import Config
from dapo_rl.demo import DEFAULT_RECIPE, start_from
from dapo_rl.errors import UserError
from dapo_rl.recipes import packaged_name
from dapo_rl.runs.config_file import NAME, is_given
from dapo_rl.runs.directory import new_run_directory
from dapo_rl.runs.resume import config_to_resume

SET_BY_LAUNCH = ("cluster.backend", "cluster.address")
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Launch:
    recipe: Path | None
    settings: tuple[str, ...]
    run: Path
    config: Config

    @property
    def name(self) -> str:
        return self.run.name

    def words(self, *more: str) -> list[str]:
        """The arguments of `dapo`, without `cluster.address`, `--run` and `--resume`."""
        recipe = [] if self.recipe is None else [packaged_name(self.recipe) or str(self.recipe)]
        recipe = [f".{os.sep}{word}" if word.startswith("-") else word for word in recipe]
        return ["train", *recipe, *self.settings, "cluster.backend=ray", *more]


def plan_launch(recipe: Path | None, settings: Sequence[str], run: Path | None) -> Launch:
    """Reads the recipe and its settings; a mistake in them is found here, not by the job."""
    for key in SET_BY_LAUNCH:
        if is_given(key, settings):
            raise UserError(f"{key}: `dapo launch` sets it; leave it out")
    start = start_from(recipe, [*settings, "cluster.backend=ray"])
    config = start.load()
    name = "dapo" if start.custom else (recipe or DEFAULT_RECIPE).stem
    path = Path(os.path.abspath(new_run_directory(name) if run is None else expanded(run)))
    if not str(path).isprintable():
        raise UserError(f"--run: {str(path)!r} has a control character in it; choose another name")
    return Launch(recipe, tuple(settings), path, config)


def resumes(launch: Launch) -> bool:
    """Whether the directory has a run to resume; raises if that run has other settings."""
    if not (run := launch.run / NAME).exists():
        return (launch.run / CHECKPOINTS).is_dir()
    config_to_resume(run.parent, None, launch.recipe, [*launch.settings, "cluster.backend=ray"])
    return True
