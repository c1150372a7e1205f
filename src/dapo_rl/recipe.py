"""Reading a recipe, and explaining in one line what is wrong with one. Which keys there are, `config.py` knows."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dapo_rl.errors import UserError

NAMES_ELSEWHERE = {
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "clip_ratio_low": "algo.clip_low",
    "clip_ratio_high": "algo.clip_high",
    "eps_clip": "algo.clip_low",
    "eps_clip_higher": "algo.clip_high",
    "beta": "algo.kl_coef",
    "kl_loss_coef": "algo.kl_coef",
    "loss_type": "algo.aggregation",
    "loss_agg_mode": "algo.aggregation",
    "filter_groups": "sampling.dynamic",
    "dynamic_sample": "sampling.dynamic",
    "max_num_gen_batches": "sampling.cap",
    "max_resample_times": "sampling.cap",
    "dynamic_filter_fn": "sampling.filter",
    "dynamic_bs": "sampling.dynamic_batch",
    "num_generations": "sampling.group_size",
    "n": "sampling.group_size",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "overlong_filter": "overlong.mask_truncated",
    "mask_truncated_completions": "overlong.mask_truncated",
    "soft_overlong": "overlong.shape",
    "overlong_buffer": "overlong.shape",
    "soft_max_length": "overlong.max_length",
    "soft_cache_length": "overlong.cache_length",
    "overlong_tokens": "overlong.cache_length",
    "overlong_penalty_factor": "overlong.factor",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_iterations": "train.epochs_per_step",
    "ppo_epochs": "train.epochs_per_step",
    "train_batch_size": "sampling.prompts_per_step",
    "max_grad_norm": "train.max_grad_norm",
    "model_name_or_path": "model.name",
    "reward_funcs": "reward.verifier",
    "custom_reward_function": "reward.verifier",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every",
}
"""What verl, TRL, ms-swift and AReaL call a key, so that a mistaken name can be answered with the right one."""


def read_recipe(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe{_recipes_nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a recipe: {error}") from None
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, not a {type(settings).__name__}")
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        put(nested, str(key), value)
    return nested


def _recipes_nearby(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.glob("*.yaml")]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value under a dotted key; mappings are merged."""
    *path, last = key.split(".")
    level = settings
    for name in path:
        inner = level.get(name)
        if not isinstance(inner, dict):
            # A plain source (`data.train: FILE`) that gets a parameter becomes {source: FILE, parameter: …}.
            inner = {"source": inner} if isinstance(inner, str) else {}
            level[name] = inner
        level = inner
    if isinstance(value, Mapping):
        if not isinstance(level.get(last), dict):
            level[last] = {}
        for inner_key, inner_value in value.items():
            put(level[last], str(inner_key), inner_value)
    else:
        level[last] = value


def parse_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{key}: {text!r} is not a value; quote it as in YAML") from None


def explain(error: ValidationError, keys: Collection[str]) -> str:
    """The first mistake in one line: the key, what is wrong, and the nearest right one of `keys`."""
    first, *others = error.errors()
    location = [str(part) for part in first["loc"] if part not in ("str", "SourceSettings")]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        line = f"{key}: no such setting{suggestion(key, keys)}"
    elif first["type"] == "value_error":
        line = str(first["ctx"]["error"])
    elif first["type"] == "literal_error":
        close = difflib.get_close_matches(str(first["input"]), first["ctx"]["expected"].replace("'", "").split(), n=1)
        hint = f"; did you mean {close[0].strip(',')}?" if close else ""
        line = f"{key}: {first['input']!r} is not one of {first['ctx']['expected']}{hint}"
    elif key not in keys and any(known.startswith(f"{key}.") for known in keys):
        line = f"{key}: is a section, not a value{_example(key, first['input'], keys)}"
    elif isinstance(first["input"], Mapping | list) and key in keys:
        line = f"{key}: expected a single value, got a {type(first['input']).__name__}"
    else:
        line = f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    line = " ".join(line.split())
    return f"{line} (and {len(others)} more)" if others else line


def _example(section: str, value: Any, keys: Collection[str]) -> str:
    first_key = next(key for key in keys if key.startswith(f"{section}."))
    return f"; for example {first_key}={value}" if isinstance(value, str | int | float) else ""


def suggestion(key: str, keys: Collection[str]) -> str:
    """The nearest right key for a wrong one."""
    last = key.split(".")[-1]
    if last in NAMES_ELSEWHERE:
        return f"; here it is {NAMES_ELSEWHERE[last]}"
    same_name = [k for k in keys if k.split(".")[-1] == last]
    close = same_name or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not close:
        by_last = difflib.get_close_matches(last, [k.split(".")[-1] for k in keys], n=1)
        close = [k for k in keys if by_last and k.split(".")[-1] == by_last[0]]
    return f"; did you mean {close[0]}?" if close else "; `dapo train --help` lists them all"
