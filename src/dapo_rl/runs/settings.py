"""Whether the settings of a resumed run are those that it was begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        if old.get(key, missing) != new.get(key, missing) and not _is_free(key)
    ]
    if changed:
        listed = ", ".join(f"{key} {old.get(key)} → {new.get(key)}" for key in changed[:5])
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise UserError(f"{run}: was begun with other settings: {listed}{more}; start a new run for them")


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value
    return result


def _is_free(key: str) -> bool:
    return any(
        key == free or (key.startswith(free) if free.endswith(".") else key.startswith(f"{free}."))
        for free in FREE_TO_CHANGE
    )
