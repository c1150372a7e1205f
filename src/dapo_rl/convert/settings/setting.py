"""What a setting of another library is here: the record, and the conversions of single values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_rl.objectives.losses import losses_by


class NoCounterpartError(ValueError):
    """A value that no setting here expresses. The message says why; `learns` tells whether it changes learning."""

    def __init__(self, reason: str, learns: bool = True) -> None:
        super().__init__(reason)
        self.learns = learns


@dataclass(frozen=True, slots=True)
class Near:
    """The nearest value here, and what the difference does."""

    value: Any
    effect: str
    learns: bool = True


Conversion = Callable[[Any], Any]
"""From a value there to a value here or a `Near`; raises NoCounterpartError."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of another library."""

    ours: str | None = None
    """The setting here; None: it has no counterpart."""
    convert: Conversion | None = None
    note: str = ""
    """The reason that there is no counterpart, or a remark on the one that there is."""
    joint: bool = False
    """The value here follows from several settings there; `dapo_rl.convert` computes it."""
    learns: bool = False
    """Without a counterpart: whether learning depends on it."""
    mapping: bool = False
    """`ours` is a mapping, and the last part of a key there is a key of it."""
    off: tuple[Any, ...] = ()
    """Values at which a setting without a counterpart does nothing."""

    def is_off(self, value: Any) -> bool:
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)


def to(ours: str, convert: Conversion | None = None, note: str = "") -> Setting:
    """A setting with a counterpart."""
    return Setting(ours, convert, note)


def joint(ours: str, note: str = "", alone: Conversion | None = None) -> Setting:
    """A setting that gives `ours` together with others; `alone` is what it gives on its own, for hints."""
    return Setting(ours, alone, note, joint=True)


def to_each(ours: str) -> Setting:
    """A mapping with a counterpart: its keys are carried over one by one."""
    return Setting(ours, lambda value: {} if value is None else value, mapping=True)


def as_is(value: Any) -> Any:
    return value


def soft_or_off(value: Any) -> str:
    return "soft" if value else "off"


def none(reason: str) -> Setting:
    """A setting without a counterpart that does not affect what is learned."""
    return Setting(note=reason)


def changes(reason: str, *off: Any) -> Setting:
    """A setting without a counterpart that affects what is learned, except for the values `off`."""
    return Setting(note=reason, learns=True, off=(None, *off))


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
    return choice(losses_by(lambda entry: entry.level), OTHER_LOSS)(value)


def off_at_most(limit: int, off: Any) -> Conversion:
    """Numbers up to `limit`, and null, turn it off."""
    return lambda value: off if value in (None, False) or (is_number(value) and value <= limit) else value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    return (
        Near(known, f"no tracker for {', '.join(others)}; metrics.jsonl has every metric", False) if others else known
    )


def dtype_here(value: Any) -> Any:
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32", "auto": "auto"}
    names |= {"torch.bfloat16": "bfloat16", "torch.float32": "float32"}
    if value is None:
        return "auto"
    if value in names:
        return names[value]
    raise NoCounterpartError(f"{value} is not supported; model.dtype is bfloat16 or float32")


REMOTE_CODE = "code of a repository is never run; a model that needs it does not load"
OTHER_LOSS = "another policy loss; write it as algo.loss=file.py:name (docs/losses.md)"
ONE_PROCESS = "a run is one process; for several GPUs or hosts there are the cluster.* settings"
MEMORY = "memory: see train.token_budget, sampling.kv_memory_gib and train.gradient_checkpointing"
LOGS = "metrics.jsonl and rollouts/ are always written"
NAMES = "names of a run for trackers; the run directory is named with --run"
SPEED = "affects speed only"
EPOCHS = "counts passes over the data; steps = rows × epochs / prompts_per_step"
KL_IN_LOSS = "without a critic, the KL penalty is part of the loss (algo.kl_coef), not of the reward"
VLLM = "an option of vLLM; engine=vllm sets its own"
LOADING = "affects how data are loaded, not which"
SEVERAL_TURNS = "a response is one turn"
NO_VISION = "models are text only"
PER_TOKEN = "importance weights are per token (algo.importance_cap), not per sequence"
CORRECTIONS = "the corrections of off-policy tokens are algo.proximal and algo.importance_cap"
