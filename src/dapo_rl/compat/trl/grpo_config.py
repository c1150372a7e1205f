"""TRL's `GRPOConfig` in a script: the settings that its fields give, and what became of each field.

Recognised by its name, because trl is an optional dependency. The table of fields is that of `dapo convert`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.compat.trl.check_arguments import function_list
from dapo_rl.config import PRESETS, Config, SourceSettings, TrainSettings
from dapo_rl.config.peers import LIBRARIES, leaves, reason
from dapo_rl.config.peers.values import written
from dapo_rl.config.recipe import nested, put, read_recipe
from dapo_rl.convert.draft import ConvertedSetting, Draft
from dapo_rl.convert.trl import derive_evaluation, derive_updates, trl_importance
from dapo_rl.data.rows import Rows
from dapo_rl.data.sources import as_sources, choose_splits, open_rows
from dapo_rl.errors import UserError
from dapo_rl.recipes import find_recipe

NAME = "GRPOConfig"

_ELSEWHERE = (
    *("output_dir", "resume_from_checkpoint", "reward_weights", "save_strategy", "bf16"),
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_revision"),
)
"""Fields that are no settings here; `Script` and the trainer have them."""
_REWRITTEN = (
    *("accelerator_config", "dataloader_pin_memory", "disable_tqdm", "do_eval", "pad_to_multiple_of"),
    *("generation_batch_size", "steps_per_generation", "eval_steps"),
)
"""Fields that `GRPOConfig` fills in or replaces itself, so that a value does not show what the user wrote."""
_DERIVED = ("num_train_epochs", "max_steps", "eval_strategy", "num_generations_eval")
"""Fields whose difference the summary of a run shows: the number of steps."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A `GRPOConfig` as settings of this package."""

    settings: Mapping[str, Any]
    """By dotted keys."""
    fields: Mapping[str, str]
    """The field that each setting follows from, for those that the user set."""
    notes: tuple[str, ...]


def is_grpo_config(args: object) -> bool:
    return any(kind.__name__ == NAME for kind in type(args).__mro__)


def read_grpo_config(
    args: Any, count_rows: Callable[[], int | None], punishes_length: bool = False, several_turns: bool = False
) -> Moved:
    """The settings of a `GRPOConfig`. Raises UserError for a field that would change learning and has no counterpart.

    `count_rows` counts the training prompts, None if there is no end to them. `punishes_length` says that a reward
    function is TRL's Soft Overlong Punishment, which must not be applied twice. `several_turns` says that there are
    tools or environments.
    """
    if getattr(args, "world_size", 1) > 1:
        raise UserError(f"args: {args.world_size} processes; start the script with `python`: {reason('ONE_PROCESS')}")
    draft = Draft(_library(args), _set_fields(args), processes=1)
    try:
        _prepare(draft, args)
        draft.carry_over()
        _refuse(draft, args)
        _derive(draft, args, count_rows)
        if several_turns:
            _derive_turns(draft.settings)
        draft.finish()
    except UserError as error:
        raise UserError(f"args: {error}") from None
    if punishes_length or draft.settings["sampling.max_new_tokens"] < 5:
        draft.settings["overlong.shape"] = "off"
    return Moved(
        settings=draft.settings,
        fields={
            ours: row.key
            for row in draft.rows.values()
            for ours in draft.settings
            if row.is_set and f"{ours}:" in row.here and row.key not in _REWRITTEN
        },
        notes=(*_notes(draft, args), *([_RESULTS_COUNT] if several_turns else [])),
    )


def _library(args: Any) -> Any:
    """TRL's table, with the defaults of the installed version."""
    installed = _defaults(args)
    library = copy.copy(LIBRARIES["trl"])
    library.defaults = {name: _plain(installed.get(name, value)) for name, value in library.defaults.items()}
    return library


def _defaults(args: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(args)}


def _set_fields(args: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, by dotted keys."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        value = _plain(getattr(args, field.name, None))
        factory = field.default_factory
        default = _plain(field.default if factory is dataclasses.MISSING else factory())
        if value != default and not (_is_empty(value) and _is_empty(default)):
            found = leaves(field.name, value)
            result |= {key: leaf for key, leaf in found if leaf is not None or key == field.name}
    return result


def _is_empty(value: Any) -> bool:
    return value in (None, "", "none", [], {})


def _plain(value: Any) -> Any:
    """Enumerations and torch's types by their names."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if type(value).__name__ == "dtype" else value


def _name(value: Any) -> str:
    return str(_plain(value))


def _prepare(draft: Draft, args: Any) -> None:
    """Drops what has no effect in TRL either, and what depends on other fields."""
    dropped = ["bf16"]
    if _name(args.eval_strategy) != "steps":
        dropped.append("eval_steps")
    if _name(getattr(args, "save_strategy", "steps")) != "steps":
        dropped.append("save_steps")
    if args.bf16:  # weights are float32 here, whatever type they are loaded in
        dropped += ["model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"]
    for name in dropped:
        draft.keys.pop(name, None)


def _refuse(draft: Draft, args: Any) -> None:
    """Raises for fields that the user set, that would change learning, and that have no counterpart."""
    lost = ("no counterpart", "unknown to dapo convert")
    rows = [row for row in draft.rows.values() if row.is_set and row.learns and row.status in lost]
    refused = [row for row in rows if not _is_own(args, row.key)]
    if not refused:
        return
    first, others = refused[0], [row.key for row in refused[1:]]
    default = _defaults(args).get(first.key, dataclasses.MISSING)
    remedy = "leave it out" if default is dataclasses.MISSING else f"leave it at {shown(_plain(default))}"
    also = f" (also refused: {', '.join(others)})" if others else ""
    why = "not a field that this version knows" if first.status.startswith("unknown") else first.note
    raise UserError(f"{first.key}={shown(first.value)}: {why}; {remedy} to train without it{also}")


def _is_own(args: Any, key: str) -> bool:
    """Whether a field is of the user's own subclass, and not one of TRL or transformers."""
    name = key.partition(".")[0]
    for kind in type(args).__mro__:
        if name in vars(kind).get("__annotations__", {}):
            return kind.__module__.split(".")[0] not in ("trl", "transformers")
    return False


def _derive(draft: Draft, args: Any, count_rows: Callable[[], int | None]) -> None:
    settings = draft.settings
    trl_importance(draft)
    by_epoch = "epoch" in (_name(args.eval_strategy), _name(args.save_strategy))
    if by_epoch or (draft.count("max_steps") or 0) <= 0:
        draft.prompts = count_rows()
        if draft.prompts is None:
            raise UserError("num_train_epochs: the data set has no length; set max_steps")
    clips_higher = not draft.has("epsilon", "epsilon_high")
    if clips_higher:
        settings["algo.clip_high"] = None  # so that TRL's default does not replace Clip-Higher
    derive_updates(draft)
    if clips_higher:
        del settings["algo.clip_high"]
    derive_evaluation(draft)
    if not args.bf16 and "model.dtype" not in settings:
        settings["model.dtype"] = "float32"
    if _name(args.eval_strategy) == "epoch":
        settings["eval.every"] = _steps_per_epoch(draft)
    if _name(args.save_strategy) == "epoch":
        settings["checkpoint.every"] = _steps_per_epoch(draft)
    elif _name(args.save_strategy) == "no":
        settings["checkpoint.every"] = settings["train.steps"]


def _derive_turns(settings: dict[str, Any]) -> None:
    """Without `max_tool_calling_iterations`, the length alone ends an episode: each turn has a token."""
    length = settings["sampling.max_new_tokens"]
    settings.setdefault("env.max_turns", length)
    settings["env.max_observation_tokens"] = length


_RESULTS_COUNT = (
    "GRPOConfig: max_completion_length counts the policy's tokens here, and as many of tool results "
    "(env.max_observation_tokens); TRL counts both together"
)


def _last_rate(train: TrainSettings) -> float:
    """The rate of TRL's last update as a share of the first. It decays to 0 after that update; here, in the last."""
    steps = max(1, train.steps - train.warmup_steps)
    if train.lr_schedule == "cosine":
        return (1 + math.cos(math.pi * (steps - 1) / steps)) / 2
    return float(1 / steps)


def _steps_per_epoch(draft: Draft) -> int:
    assert draft.prompts is not None
    return max(1, draft.prompts // int(draft.settings["sampling.prompts_per_step"]))


def _notes(draft: Draft, args: Any) -> Iterator[str]:
    rows = [row for row in draft.rows.values() if row.key not in (*_ELSEWHERE, *_REWRITTEN, *_DERIVED)]
    ignored = list(dict.fromkeys(row.key.partition(".")[0] for row in rows if _is_ignored(row, args)))
    if ignored:
        yield f"GRPOConfig: ignored, because learning does not depend on them here: {', '.join(ignored)}"
    for row in rows:
        if row.learns and not _is_ignored(row, args):
            yield f"GRPOConfig: {row.key}={shown(row.value)} differs here: {row.note}"


def _is_ignored(row: ConvertedSetting, args: Any) -> bool:
    if row.status == "unknown to dapo convert":
        return _is_own(args, row.key)
    return row.is_set and row.status == "no counterpart" and not row.learns


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
    args: Any,
    config: Settings,
    reward_funcs: Any,
    count_rows: Callable[[Config], int | None],
    has_data: bool = True,
    several_turns: bool = False,
) -> Script:
    """The settings of `args`, a `GRPOConfig`, overridden by `config`. Either can be None. `has_data` says that the
    data, and `several_turns` that tools or environments are given as arguments."""
    if args is None:
        return Script(_as_config(config, needs_data=not has_data))
    if not is_grpo_config(args):
        raise UserError(
            f"args: expected TRL's {NAME}, got a {type(args).__name__}; settings go to config=, and data to "
            "train_dataset="
        )
    over = _as_settings(config)
    punished = any(getattr(function, "__name__", "") == _SOFT_OVERLONG for function in function_list(reward_funcs))
    moved = read_grpo_config(args, lambda: count_rows(Config.build(over)), punished, several_turns)
    result: dict[str, Any] = {}
    for key, value in _under(moved, over).items():
        put(result, key, value)
    for key, value in over.items():
        put(result, key, value)
    chosen = Config.build(result)
    if moved.settings.get("train.min_lr_share") == 0 and "min_lr_share" not in over.get("train", {}):
        put(result, "train.min_lr_share", _last_rate(chosen.train))
        chosen = Config.build(result)
    notes = (techniques_line(chosen), *moved.notes, *_overridden(moved, over))
    run_dir = None if args.output_dir in (None, "", "trainer_output") else args.output_dir
    return Script(chosen, notes, run_dir, args.reward_weights, args.push_to_hub)


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
    replaced = [
        f"{key}={written(value)} ({moved.fields[key]} gives {written(moved.settings[key])})"
        for key, value in leaves("", over)
        if key in moved.fields and value != moved.settings[key]
    ]
    return [f"config overrides args: {', '.join(replaced)}"] if replaced else []
