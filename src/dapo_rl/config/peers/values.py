"""Conversions of single values of other libraries' settings. The tables name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_rl.objectives.losses import LOSSES, losses_by

OTHER_LOSS = "another policy loss; write it as algo.loss=file.py:name (docs/losses.md)"


class NoCounterpartError(ValueError):
    """A value that no setting here expresses. The message says why; `learns` tells whether it changes learning."""

    def __init__(self, reason: str, learns: bool = True) -> None:
        super().__init__(reason)
        self.learns = learns


@dataclass(frozen=True, slots=True)
class Near:
    """The nearest value here, and the effect of the difference."""

    value: Any
    effect: str
    learns: bool = True


Conversion = Callable[[Any], Any]
"""From a value there to a value here or a `Near`; raises NoCounterpartError."""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def no_float16(value: Any) -> str:
    """`fp16`"""
    if value:
        raise NoCounterpartError("float16 is not supported; model.dtype is bfloat16 or float32")
    return "auto"


def _unless_positive(off: Any, value: Any) -> Any:
    """Numbers up to 0, and null, turn it off."""
    return off if value in (None, False) or (is_number(value) and value <= 0) else value


def choice(values: Mapping[Any, Any], otherwise: str, learns: bool = True) -> Conversion:
    """Converts by a table; other values have no counterpart."""

    def convert(value: Any) -> Any:
        try:
            return values[value]
        except (KeyError, TypeError):
            raise NoCounterpartError(otherwise, learns) from None

    return convert


def aggregation_of_trl(value: Any) -> Any:
    """`loss_type`, in TRL and ms-swift."""
    if (loss := losses_by(lambda entry: entry.trl).get(value)) is not None:
        return Near(LOSSES[loss].trl_aggregation, f"with algo.loss={loss}", False)
    if value == "bnpo":
        return Near("token-mean", "averages over the tokens of the update, not of each micro-batch")
    names = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    if value not in names:
        raise NoCounterpartError(OTHER_LOSS)
    return names[value]


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
    names: dict[Any, str] = {"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}
    names |= {"bf16": "bfloat16", "fp32": "float32", None: "auto"}
    names |= {"torch.bfloat16": "bfloat16", "torch.float32": "float32"}
    if value in names:
        return names[value]
    raise NoCounterpartError(f"{value} is not supported; model.dtype is bfloat16 or float32")


CONVERSIONS: dict[str, Conversion] = {
    "as_is": lambda value: value,
    "boolean": bool,
    "zero_if_null": lambda value: value or 0.0,
    "one_if_null": lambda value: 1.0 if value is None else value,
    "two_if_null": lambda value: 2 if value is None else value,
    "one_more": lambda value: value + 1,
    "listed": lambda value: [value] if isinstance(value, str) else value or [],
    "mapping_if_null": lambda value: {} if value is None else value,
    "null_unless_positive": lambda value: _unless_positive(None, value),
    "zero_unless_positive": lambda value: _unless_positive(0, value),
    "top_k_of_areal": lambda value: 0 if value <= 0 or value >= 100_000_000 else value,
    "soft_or_off": lambda value: "soft" if value else "off",
    "vllm_or_native": lambda value: "vllm" if value else "native",
    "cpu_or_auto": lambda value: "cpu" if value else "auto",
    "bfloat16_or_auto": lambda value: "bfloat16" if value else "auto",
    "no_float16": no_float16,
    "dtype_here": dtype_here,
    "sources": sources,
    "trackers": trackers,
    "loss_of_level": lambda value: choice(losses_by(lambda entry: entry.level), OTHER_LOSS)(value),
    "loss_of_verl": lambda value: choice(losses_by(lambda entry: entry.verl), OTHER_LOSS)(value),
    "aggregation_of_trl": aggregation_of_trl,
}
"""By the names that the tables use."""


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
