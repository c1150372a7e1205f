"""The settings of a resumed run: those of its newest checkpoint, unless the user overrides them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_rl.config import Config
from dapo_rl.config.recipe import put
from dapo_rl.errors import UserError
from dapo_rl.runs.config_file import NAME, ConfigFile, is_given
from dapo_rl.runs.settings import check_same_run, flat, is_free, listed


def config_to_resume(
    run: Path, kept: ConfigFile | None, recipe: Path | None, overrides: Sequence[str]
) -> tuple[Config, list[str]]:
    """The settings of the recipe if there is one, else of the run, with overrides; and notes for the user.

    `kept` has the settings of the newest checkpoint; without a checkpoint, the run's config.yaml is used.
    """
    notes: list[str] = []
    if recipe is not None:
        config = Config.load(recipe, overrides)
        before = (kept or _only(run)).over(config)
    elif kept is None:
        only = _only(run)
        config = only.whole_config(overrides)
        before = only.over(config)
        if only.was_edited:
            notes.append(f"{only.path}: was edited, and there is no checkpoint to compare it with; using it as it is")
    else:
        file, notes = _newest(run / NAME, kept, overrides)
        config = file.config(overrides)
        before = kept.over(config)
    check_same_run(run, before, config)
    return config, notes


def _only(run: Path) -> ConfigFile:
    try:
        return ConfigFile.read(run / NAME)
    except UserError as error:
        raise UserError(f"{error}, and no checkpoint has the settings; restore it, or start a new run") from None


def _newest(path: Path, kept: ConfigFile, overrides: Sequence[str]) -> tuple[ConfigFile, list[str]]:
    """The settings of the checkpoint, or those that the run wrote after it; and what is wrong with config.yaml."""
    instead = f"using the settings of {kept.path.parent}"
    try:
        file = ConfigFile.read(path)
    except UserError as error:
        return kept, [f"{error}; {instead}"]
    if file.content == kept.content:
        return kept, []
    if kept.content.startswith(file.content):
        return kept, [f"{path}: is truncated; {instead}"]
    if file.is_whole:  # the run was resumed with different settings, and ended before it wrote a checkpoint
        changed, old, new = _changes(kept, file.settings)
        note = f"{path}: {listed(changed, old, new)} since {kept.path.parent} was written; using the new settings"
        return file, [note] if changed else []
    changed, old, new = _changes(kept, file.settings, path)
    if changed := [key for key in changed if not is_given(key, overrides)]:
        fixed = [key for key in changed if not is_free(key)]
        how = f"give {changed[0]}={_word(new.get(changed[0]))} on the command line to change it"
        how = f"{fixed[0]} cannot change within a run; start a new run for it" if fixed else how
        raise UserError(
            f"{path}: was edited: {listed(changed, old, new)}; {how}, or copy {kept.path} here to resume unchanged"
        )
    lost = file.missing(kept.settings)
    return kept, [f"{path}: has no {lost[0]}; {instead}"] if lost else []


def _changes(
    kept: ConfigFile, settings: dict[str, Any], path: Path | None = None
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The keys whose values differ from a checkpoint's, and both sets of values; a missing key is not a change."""
    merged = copy.deepcopy(kept.settings)
    for key, value in settings.items():
        put(merged, key, value)
    before, after = kept.config(), replace(kept, path=path or kept.path, settings=merged).config()
    old, new = flat(before.resolved()), flat(after.resolved())
    return [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)], old, new


def _word(value: Any) -> str:
    """A value as on the command line; JSON is valid YAML."""
    return value if isinstance(value, str) else json.dumps(value)
