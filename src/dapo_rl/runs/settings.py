"""Whether the settings of a resumed run are those that it was begun with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import cut
from dapo_rl.config import Config
from dapo_rl.errors import UserError

FREE_TO_CHANGE = (
    *("train.steps", "train.lr", "train.lr_schedule", "train.min_lr_share", "train.warmup_steps"),
    *("train.max_grad_norm", "train.token_budget", "train.gradient_checkpointing", "train.packed"),
    *("sampling.cap", "sampling.on_cap", "sampling.max_batch", "sampling.kv_memory_gib"),
    *("reward.timeout_s", "reward.memory_mb", "reward.workers", "reward.max_error_share"),
    *("eval.", "checkpoint.", "log.", "data.eval"),
)
"""What a resumed run may have otherwise than it began: its length, what is written, and the remedies that our own
errors advise. Anything else would make it another run."""


def check_same_run(run: Path, before: Config, after: Config) -> None:
    """An error that names the settings which make `after` another run than `before`."""
    old, new = flat(before.resolved()), flat(after.resolved())
    if new["model.dtype"] == "auto":  # becomes a type once the model is there, and is compared then
        new["model.dtype"] = old["model.dtype"]
    missing = object()
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing) and not is_free(key)
    ]
    if changed:
        raise UserError(f"{run}: was begun with other settings: {listed(changed, old, new)}; start a new run for them")


def listed(keys: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], most: int = 5) -> str:
    """`key old → new` for the first of the keys, and how many more there are."""
    first = ", ".join(f"{key} {cut(str(old.get(key)), 80)} → {cut(str(new.get(key)), 80)}" for key in keys[:most])
    return first + (f" and {len(keys) - most} more" if len(keys) > most else "")


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def is_free(key: str) -> bool:
    return any(
        key == free or (key.startswith(free) if free.endswith(".") else key.startswith(f"{free}."))
        for free in FREE_TO_CHANGE
    )
