"""Checks the arguments of `DAPOTrainer`: a wrong one is explained in one line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from dapo_rl.base.quote import shown
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.recipe import setting_named

_OTHER_NAMES = {
    "tokenizer": ("processing_class",),
    "dataset": ("train_dataset",),
    "output_dir": ("run_dir", "path"),
}
"""Names that other libraries, or earlier versions of them, give to an argument."""
_TOKENIZER = ("decode", "eos_token_id", "__call__")
_DISPLAY = ("start", "phase", "step", "note", "finish", "__enter__", "__exit__")


def refuse_unknown(function: Callable[..., Any], unknown: Mapping[str, Any], of: str) -> None:
    """Raises UserError for keyword arguments that the function does not name."""
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    for name in unknown:
        close = next((other for other in _OTHER_NAMES.get(name, ()) if other in known), None) or nearest(name, known)
        setting = None if close else setting_named(name, known_keys())
        otherwise = f"it has {', '.join(known) or 'none'}"
        if setting is not None and "config" in known:
            otherwise = f"settings go to config, as in config={{{setting!r}: …}}"
        raise UserError(f"{of}: no argument {name}{did_you_mean(close, otherwise)}")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises UserError for an argument of a type that it cannot have; None is always accepted."""
    for name, value in arguments.items():
        if value is None:
            continue
        fits, expected = _KINDS[name]
        if not fits(value):
            raise _unexpected(name, expected, value)


def check_path(name: str, value: Any) -> None:
    if value is not None and not _is_path(value):
        raise _unexpected(name, "a path", value)


def check_text(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise _unexpected(name, "a string", value)


def check_resume(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool) and not _is_path(value):
        raise _unexpected(name, "True, False or the path of a checkpoint", value)


def _unexpected(name: str, expected: str, value: Any) -> UserError:
    return UserError(f"{name}: expected {expected}, got {shown(value)} ({type(value).__name__})")


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def _is_model(value: Any) -> bool:
    loaded = not isinstance(value, type) and callable(getattr(value, "parameters", None)) and hasattr(value, "config")
    return _is_path(value) or loaded


def _has(names: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_model, "a name, a directory or a loaded model of transformers"),
    "config": (
        lambda value: isinstance(value, Config | Mapping) or _is_path(value),
        "a mapping of settings, a Config, or the path or name of a recipe",
    ),
    "processing_class": (_has(_TOKENIZER), "a tokenizer (transformers' AutoTokenizer.from_pretrained loads one)"),
    "engine": (
        lambda value: not isinstance(value, str | int | float),
        "an engine, or a class or function that makes one (a name goes to config={'engine': …})",
    ),
    "run_dir": (_is_path, "a path"),
    "display": (_has(_DISPLAY), "a display (dapo_rl.runs.display.Display)"),
}
"""For each argument: whether a value can be one, and what is expected."""
