"""The arguments of TRL's `GRPOTrainer`: which of them are accepted, and the settings that they give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.compat.trl.grpo_config import NAME, Moved, is_grpo_config, read_grpo_config
from dapo_rl.config import PRESETS, Config
from dapo_rl.convert.settings import leaves
from dapo_rl.convert.settings.values import written
from dapo_rl.errors import UserError
from dapo_rl.recipe import nested, put, read_recipe
from dapo_rl.recipes import find_recipe

_ONE_TURN = "a run trains on single responses with verifiable rewards; to train an agent, use TRL's GRPOTrainer or verl"
REFUSED = {
    "reward_processing_classes": (
        "reward models are not supported; write a reward function that loads the model and its tokenizer"
    ),
    "optimizers": (
        "an optimizer of your own is not supported; it is AdamW, by train.lr, train.optimizer and train.lr_schedule"
    ),
    "quantization_config": (
        "quantised weights are not supported; they are stored in float32, and model.lora saves memory"
    ),
    "tools": f"tools are not supported yet: {_ONE_TURN}",
    "rollout_func": (
        "a rollout function is not supported; if it samples one response per prompt, write it as an engine "
        "(engine=, docs/engines.md), and use TRL's GRPOTrainer or verl if it does not"
    ),
    "environment_factory": f"environments are not supported yet: {_ONE_TURN}",
}
"""Arguments of `GRPOTrainer` that have no counterpart, and why."""

_SOFT_OVERLONG = "soft_overlong_punishment_reward"
"""The name of the function that TRL's `get_soft_overlong_punishment` returns."""

Settings = Config | Mapping[str, Any] | str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Script:
    """The settings of a script, from `args` and `config`."""

    config: Config
    moved: Moved | None = None
    notes: tuple[str, ...] = ()

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates between steps."""
        return self.config.eval.every is not None

    @property
    def run_dir(self) -> str | None:
        return None if self.moved is None else self.moved.run_dir

    @property
    def pushes(self) -> bool:
        """Whether the model is to be uploaded after training."""
        return self.moved is not None and self.moved.pushes

    @property
    def reward_weights(self) -> list[float] | None:
        return None if self.moved is None else self.moved.reward_weights


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises UserError for an argument in `REFUSED` that is not left out."""
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, tuple | list) and all(one is None for one in value))
        if not empty:
            raise UserError(f"{name}: {REFUSED[name]}")


def refuse_models(reward_funcs: Any, processing_class: Any) -> None:
    """Raises UserError for a reward model, and for the processor of a vision model."""
    for function in _listed(reward_funcs):
        is_name = isinstance(function, str) and "/" in function and ":" not in function and ".py" not in function
        if is_name or (hasattr(function, "forward") and hasattr(function, "parameters")):
            name = function if is_name else type(function).__name__
            raise UserError(
                f"reward_funcs: {name} is a reward model; rewards come from functions: write one that loads the model "
                "and returns its scores, f(prompts, completions, **columns)"
            )
    if hasattr(processing_class, "image_processor") or hasattr(processing_class, "feature_extractor"):
        raise UserError(
            f"processing_class: {type(processing_class).__name__} is a processor of images or audio, which are not "
            "supported; to train on text, give its tokenizer"
        )


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
    punished = any(getattr(function, "__name__", "") == _SOFT_OVERLONG for function in _listed(reward_funcs))
    moved = read_grpo_config(args, lambda: count_rows(Config.build(over)), punished)
    result: dict[str, Any] = {}
    for key, value in _under(moved, over).items():
        put(result, key, value)
    for key, value in over.items():
        put(result, key, value)
    chosen = Config.build(result)
    notes = (techniques_line(chosen), *moved.notes, *_overridden(moved, over))
    return Script(chosen, moved, notes)


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


def _listed(reward_funcs: Any) -> list[Any]:
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


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
