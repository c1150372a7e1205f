"""Checks the arguments of `DAPOTrainer`, which are those of TRL's `GRPOTrainer`, and explains a wrong one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.base.format import counted
from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import REWARD_MODEL, is_judge, is_reward_model
from dapo_rl.config import Config, known_keys
from dapo_rl.config.recipe import setting_named
from dapo_rl.envs.tools import load_tools
from dapo_rl.envs.trl_environment import check_class, class_of, owns_reward
from dapo_rl.errors import UserError
from dapo_rl.rewards.model_verifier import GivenModel

_OTHER_NAMES = {
    "tokenizer": ("processing_class",),
    "dataset": ("train_dataset",),
    "output_dir": ("run_dir", "path"),
}
"""Names that other libraries, or earlier versions of them, give to an argument."""
REFUSED = {
    "optimizers": (
        "a custom optimizer is not supported; it is AdamW, by train.lr, train.optimizer and train.lr_schedule"
    ),
    "quantization_config": (
        "quantised weights are not supported; they are stored in float32, and model.lora saves memory"
    ),
    "rollout_func": (
        "a rollout function is not supported; if it samples one response per prompt, write it as an engine "
        "(engine=, docs/engines.md), and as an environment or an agent if it does not (docs/environments.md)"
    ),
}
"""Arguments of `GRPOTrainer` that have no counterpart, and why."""
_TOKENIZER = ("decode", "eos_token_id", "__call__")
_DISPLAY = ("start", "phase", "step", "note", "finish", "__enter__", "__exit__")


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any], of: str) -> None:
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    for name in unknown:
        close = next((other for other in _OTHER_NAMES.get(name, ()) if other in known), None) or nearest(name, known)
        setting = None if close else setting_named(name, known_keys())
        otherwise = f"it has {', '.join(known) or 'none'}"
        if setting is not None and "config" in known:
            otherwise = f"settings go to config, as in config={{{setting!r}: …}}"
        raise UserError(f"{of}: no argument {name}{did_you_mean(close, otherwise)}")


def check_arguments(**arguments: Any) -> None:
    """Raises UserError for an argument of a type that it cannot have; None is always accepted."""
    for name, value in arguments.items():
        fits, expected = _KINDS[name]
        if value is not None and not fits(value):
            raise UserError(f"{name}: expected {expected}, got {shown(value)} ({type(value).__name__})")


def refuse_arguments(**arguments: Any) -> None:
    for name, value in arguments.items():
        empty = value is None or (isinstance(value, tuple | list) and all(one is None for one in value))
        if not empty:
            raise UserError(f"{name}: {REFUSED[name]}")


def with_reward_models(reward_funcs: Any, processing_classes: Any) -> Any:
    """The reward functions, with the models among them and their tokenizers as `GivenModel`s. As in TRL, a name or a
    directory stands for a model, and `reward_processing_classes` has one entry for each function."""
    functions = function_list(reward_funcs)
    given = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if processing_classes is None:
        given = [None] * len(functions)
    if len(given) != len(functions):
        raise UserError(
            f"reward_processing_classes: {len(given)} for {counted(len(functions), 'reward function')}; give one for "
            "each, None for those that are no models"
        )
    read = [_with_model(function, own) for function, own in zip(functions, given, strict=True)]
    return read if isinstance(reward_funcs, list | tuple) else read[0]


def _with_model(function: Any, processing_class: Any) -> Any:
    is_model = hasattr(function, "forward") and hasattr(function, "parameters")
    if isinstance(function, str):
        name = function.removeprefix(REWARD_MODEL)
        is_path = "/" in name and ":" not in name and not is_judge(name) and ".py" not in name
        is_model = is_reward_model(function) or is_path or Path(name, "config.json").is_file()
        function = name if is_model else function
    if is_model:
        check_arguments(reward_processing_classes=processing_class)
        return GivenModel(function, processing_class)
    if processing_class is not None:
        raise UserError(f"reward_processing_classes: {shown(function)} is no model; give None for it")
    return function


def refuse_processor(processing_class: Any) -> None:
    if hasattr(processing_class, "image_processor") or hasattr(processing_class, "feature_extractor"):
        raise UserError(
            f"processing_class: {type(processing_class).__name__} is a processor of images or audio, which are not "
            "supported; to train on text, give its tokenizer"
        )


def check_environments(
    environment_factory: Any, tools: Sequence[Any] | None, reward_funcs: Any, train_dataset: Any, args: Any
) -> None:
    """Raises UserError for functions that cannot be tools, and for environments without `reset`, without anything to
    reward, or without rows to choose by."""
    load_tools(tools or ())
    if environment_factory is None:
        return
    named = isinstance(environment_factory, Mapping)
    for name, factory in environment_factory.items() if named else [("", environment_factory)]:
        where = f"environment_factory: {name}" if name else "environment_factory"
        check_class(class_of(factory, where), where, tools or ())
    if reward_funcs is None and not owns_reward(environment_factory):
        raise UserError("environment_factory: nothing gives a reward; write a method get_reward, or give reward_funcs")
    if train_dataset is not None:
        return
    if named:
        raise UserError(
            "environment_factory: several environments need a train_dataset whose column `environment` names one for "
            "each row"
        )
    if args is not None and getattr(args, "max_steps", 1) <= 0:
        raise UserError("args: without train_dataset there are no epochs to count; set max_steps")


def function_list(reward_funcs: Any) -> list[Any]:
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def resume_requested(checkpoint: str | os.PathLike[str] | bool | None, run_dir: Path) -> bool:
    """Whether to continue the run. A run continues from its newest checkpoint, so a path must be of this run."""
    if not isinstance(checkpoint, str | os.PathLike):
        return bool(checkpoint)
    if not Path(checkpoint).resolve().is_relative_to(run_dir.resolve()):
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} is not in {run_dir}; a run continues in its own directory: give it "
            "as output_dir or run_dir, and resume_from_checkpoint=True"
        )
    return True


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def _is_model(value: Any) -> bool:
    loaded = not isinstance(value, type) and callable(getattr(value, "parameters", None)) and hasattr(value, "config")
    return _is_path(value) or loaded


def _has(names: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _are_functions(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(callable, value))


def _are_factories(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(name, str) for name in value) and all(map(callable, value.values()))
    return callable(value)


_TEXT = (lambda value: isinstance(value, str), "a string")
_A_TOKENIZER = (_has(_TOKENIZER), "a tokenizer (transformers' AutoTokenizer.from_pretrained loads one)")
_RESUME = (lambda value: isinstance(value, bool) or _is_path(value), "True, False or the path of a checkpoint")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_model, "a name, a directory or a loaded model of transformers"),
    "config": (
        lambda value: isinstance(value, Config | Mapping) or _is_path(value),
        "a mapping of settings, a Config, or the path or name of a recipe",
    ),
    "processing_class": _A_TOKENIZER,
    "reward_processing_classes": _A_TOKENIZER,
    "engine": (
        lambda value: not isinstance(value, str | int | float),
        "an engine, or a class or function that makes one (a name goes to config={'engine': …})",
    ),
    "tools": (_are_functions, "a list of functions"),
    "environment_factory": (_are_factories, "a class, a function that makes an environment, or a mapping of them"),
    "run_dir": (_is_path, "a path"),
    "path": (_is_path, "a path"),
    "resume": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "repo_id": _TEXT,
    "commit_message": _TEXT,
    "revision": _TEXT,
    "display": (_has(_DISPLAY), "a display (dapo_rl.runs.display.Display)"),
}
"""For each argument: whether a value can be one, and what is expected."""
