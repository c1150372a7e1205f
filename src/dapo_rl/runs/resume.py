"""The settings of a resumed run: those of its newest checkpoint, unless the user overrides them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import cut
from dapo_rl.config import Config
from dapo_rl.config.recipe import flat, put
from dapo_rl.errors import UserError
from dapo_rl.runs.config_file import NAME, ConfigFile, is_given

FREE_TO_CHANGE = (
    *("train.steps", "train.lr", "train.lr_schedule", "train.min_lr_share", "train.warmup_steps"),
    *("train.max_grad_norm", "train.token_budget", "train.gradient_checkpointing", "train.packed", "train.fused"),
    "train.memory",
    *("sampling.cap", "sampling.on_cap", "sampling.metric", "sampling.max_batch", "sampling.kv_memory_gib"),
    *("reward.timeout_s", "reward.memory_mb", "reward.workers", "reward.max_error_share"),
    *("env.timeout_s", "env.memory_mb", "env.workers", "env.workers_per_node", "env.max_error_share"),
    *("env.host", "env.port", "env.tls"),
    *("teacher.timeout_s", "teacher.retries", "teacher.api_key_env"),
    *("eval.", "checkpoint.", "log.", "data.eval", "model.save_dtype"),
    *("cluster.address", "cluster.engines", "cluster.engine_gpus", "cluster.ranks", "cluster.placement"),
    *("cluster.weights", "cluster.offload", "cluster.restarts", "cluster.timeout_s"),
)
"""Settings that may change when a run is resumed: its length, its outputs, and those that error messages recommend
changing. Any other change would make it a different run."""


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
    """The settings of the checkpoint, or newer ones that the run wrote; and notes on a damaged config.yaml."""
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
        how = f"give {changed[0]}={override_word(new.get(changed[0]))} on the command line to change it"
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


def override_word(value: Any) -> str:
    """A value as on the command line; JSON is valid YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def check_same_run(run: Path, before: Config, after: Config) -> None:
    """Raises UserError with the settings that changed although they must not."""
    old, new = (flat(config.resolved()) | _verifiers(config) for config in (before, after))
    if new["model.dtype"] == "auto":  # resolved and compared once the model is loaded
        new["model.dtype"] = old["model.dtype"]
    if before.teacher.served and after.teacher.served:  # at another address
        new["teacher.name"] = old["teacher.name"]
    missing = object()
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing) and not is_free(key)
    ]
    if changed:
        raise UserError(f"{run}: was started with different settings: {listed(changed, old, new)}; start a new run")


def _verifiers(config: Config) -> dict[str, Any]:
    """The verifiers with their weights, without their time limits, which may change."""
    entries = config.reward.verifiers
    weighted = (e.verifier if e.weight == 1 else f"{e.weight!r} × {e.verifier}" for e in entries)
    return {"reward.verifier": ", ".join(weighted)}


def listed(keys: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], most: int = 5) -> str:
    """`key old → new` for the first keys, and the number of further ones."""
    first = ", ".join(f"{key} {cut(str(old.get(key)), 80)} → {cut(str(new.get(key)), 80)}" for key in keys[:most])
    return first + (f" and {len(keys) - most} more" if len(keys) > most else "")


def is_free(key: str) -> bool:
    return any(
        key == free or (key.startswith(free) if free.endswith(".") else key.startswith(f"{free}."))
        for free in FREE_TO_CHANGE
    )
