"""Conversions of single values of other libraries' settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_rl.convert.settings import reasons
from dapo_rl.convert.settings.setting import Conversion, Near, NoCounterpartError
from dapo_rl.objectives.losses import losses_by


def as_is(value: Any) -> Any:
    return value


def soft_or_off(value: Any) -> str:
    return "soft" if value else "off"


def unless_null(default: Any) -> Conversion:
    return lambda value: default if value is None else value


def off_at_most(limit: int, off: Any) -> Conversion:
    """Numbers up to `limit`, and null, turn it off."""
    return lambda value: off if value in (None, False) or (is_number(value) and value <= limit) else value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(*names: str) -> dict[Any, str]:
    """A table for `choice` of names that are the same here."""
    return {name: name for name in names}


def choice(values: Mapping[Any, Any], otherwise: str, learns: bool = True) -> Conversion:
    """Converts by a table; other values have no counterpart."""

    def convert(value: Any) -> Any:
        try:
            return values[value]
        except (KeyError, TypeError):
            raise NoCounterpartError(otherwise, learns) from None

    return convert


def loss_of_level(value: Any) -> Any:
    """`importance_sampling_level`: whether a ratio is that of a token or of a sequence."""
    return choice(losses_by(lambda entry: entry.level), reasons.OTHER_LOSS)(value)


def sources(value: Any) -> Any:
    """A data set, or a list of several."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names if name is not None):
        raise TypeError
    names = [name for name in names if name]
    if not names:
        raise NoCounterpartError("no data set is named", learns=False)
    return names[0] if len(names) == 1 else names


def trackers(value: Any) -> Any:
    """Names of trackers. The console and metrics.jsonl are always written."""
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    others = [str(name) for name in names if name not in (*known, "console", "none", "file", None, "rich_console")]
    effect = f"no tracker for {', '.join(others)}; metrics.jsonl has every metric"
    return Near(known, effect, learns=False) if others else known


def dtype_here(value: Any) -> Any:
    names = same("bfloat16", "float32", "auto") | {"bf16": "bfloat16", "fp32": "float32", None: "auto"}
    names |= {"torch.bfloat16": "bfloat16", "torch.float32": "float32"}
    if value in names:
        return names[value]
    raise NoCounterpartError(f"{value} is not supported; model.dtype is bfloat16 or float32")


def written(value: Any) -> str:
    """A value as it is written in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(item) for item in value)}]"
    return str(value)
