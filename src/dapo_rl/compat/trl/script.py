"""The settings of a script written for TRL: those of its `GRPOConfig`, overridden by `config`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.compat.trl.arguments import function_list
from dapo_rl.compat.trl.grpo_config import NAME, Moved, is_grpo_config, read_grpo_config
from dapo_rl.config import PRESETS, Config, SourceSettings
from dapo_rl.config.recipe import nested, put, read_recipe
from dapo_rl.convert.settings import leaves
from dapo_rl.convert.settings.values import written
from dapo_rl.data.rows import Rows
from dapo_rl.data.sources import as_sources, choose_splits, open_rows
from dapo_rl.errors import UserError
from dapo_rl.recipes import find_recipe

_SOFT_OVERLONG = "soft_overlong_punishment_reward"
"""The name of the function that TRL's `get_soft_overlong_punishment` returns."""

Settings = Config | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Script:
    """The settings of a script, from `args` and `config`."""

    config: Config
    notes: tuple[str, ...] = ()
    run_dir: str | None = None
    reward_weights: list[float] | None = None
    pushes: bool = False
    """Whether the model is to be uploaded after training."""


def script_settings(
    args: Any, config: Settings, reward_funcs: Any, count_rows: Callable[[Config], int | None], has_data: bool = True
) -> Script:
    """The settings of `args`, a `GRPOConfig`, overridden by `config`. Either can be None. `has_data` says that the data
    set is given as an argument."""
    if args is None:
        return Script(_as_config(config, needs_data=not has_data))
    if not is_grpo_config(args):
        raise UserError(
            f"args: expected TRL's {NAME}, got a {type(args).__name__}; settings go to config=, and data to "
            "train_dataset="
        )
    over = _as_settings(config)
    punished = any(getattr(function, "__name__", "") == _SOFT_OVERLONG for function in function_list(reward_funcs))
    moved = read_grpo_config(args, lambda: count_rows(Config.build(over)), punished)
    result: dict[str, Any] = {}
    for key, value in _under(moved, over).items():
        put(result, key, value)
    for key, value in over.items():
        put(result, key, value)
    chosen = Config.build(result)
    notes = (techniques_line(chosen), *moved.notes, *_overridden(moved, over))
    return Script(chosen, notes, moved.run_dir, moved.reward_weights, moved.pushes)


def techniques_line(config: Config) -> str:
    """One line with the batch, the number of steps and DAPO's techniques."""
    sampling, algo, overlong = config.sampling, config.algo, config.overlong
    prompts, samples = counted(sampling.prompts_per_step, "prompt"), counted(sampling.group_size, "sample")
    step = f"{prompts} × {samples} per step, {counted(config.train.steps, 'step')}"
    punished = f"over the last {config.overlong_cache_length} of {config.overlong_max_length} tokens"
    techniques = [
        f"Dynamic Sampling {'on' if sampling.dynamic else 'off'}",
        f"clipping at 1 − {algo.clip_low:g} and 1 + {algo.clip_high:g}",
        f"loss {algo.aggregation}",
        f"Soft Overlong Punishment {punished if overlong.shape == 'soft' else 'off'}",
    ]
    return f"{NAME}: {step}; {', '.join(techniques)}"


def count_rows(train_dataset: Any, config: Config) -> int | None:
    """The rows of the training data; None if they have no length."""
    source = as_sources(choose_splits(train_dataset, None, False)[0], "train_dataset")
    if source is None or isinstance(source, str | os.PathLike | SourceSettings | tuple):
        rows = open_rows(config.data.train if source is None else source)
        return len(rows.good) if isinstance(rows, Rows) else None
    return len(source) if hasattr(source, "__len__") else None


def _as_config(config: Settings, needs_data: bool) -> Config:
    if isinstance(config, Mapping):
        return Config.build(config)
    if isinstance(config, Config):
        return config
    loaded = Config.load(Path(config) if config is not None else None)
    if config is not None and needs_data:
        loaded.check_data(os.fspath(config))
    return loaded


def _as_settings(config: Settings) -> dict[str, Any]:
    """Only what `config` sets, by sections."""
    if config is None:
        return {}
    if isinstance(config, Config):
        return config.model_dump(mode="json", exclude_unset=True)
    return nested(config) if isinstance(config, Mapping) else read_recipe(find_recipe(config))


def _under(moved: Moved, over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `args`; a preset in `config` overrides those that only follow from TRL's defaults."""
    sections = PRESETS.get(str(over.get("preset")), {})
    preset = {f"{section}.{name}" for section, values in sections.items() for name in values}
    return {key: value for key, value in moved.settings.items() if key in moved.fields or key not in preset}


def _overridden(moved: Moved, over: Mapping[str, Any]) -> list[str]:
    """A note on the fields that `config` overrides."""
    replaced = [
        f"{key}={written(value)} ({moved.fields[key]} gives {written(moved.settings[key])})"
        for key, value in leaves("", over)
        if key in moved.fields and value != moved.settings[key]
    ]
    return [f"config overrides args: {', '.join(replaced)}"] if replaced else []
