"""Checks that a resumed run has the settings that it was started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import cut
from dapo_rl.config import Config
from dapo_rl.errors import UserError

FREE_TO_CHANGE = (
    *("train.steps", "train.lr", "train.lr_schedule", "train.min_lr_share", "train.warmup_steps"),
    *("train.max_grad_norm", "train.token_budget", "train.gradient_checkpointing", "train.packed", "train.fused"),
    "train.memory",
    *("sampling.cap", "sampling.on_cap", "sampling.metric", "sampling.max_batch", "sampling.kv_memory_gib"),
    *("reward.timeout_s", "reward.memory_mb", "reward.workers", "reward.max_error_share"),
    *("eval.", "checkpoint.", "log.", "data.eval", "model.save_dtype"),
    *("cluster.address", "cluster.engines", "cluster.engine_gpus", "cluster.ranks", "cluster.placement"),
    *("cluster.weights", "cluster.offload", "cluster.restarts", "cluster.timeout_s"),
)
"""Settings that may change when a run is resumed: its length, its outputs, and those that error messages recommend
changing. Any other change would make it a different run."""


def check_same_run(run: Path, before: Config, after: Config) -> None:
    """Raises UserError with the settings that changed although they must not."""
    old, new = (flat(config.resolved()) | _verifiers(config) for config in (before, after))
    if new["model.dtype"] == "auto":  # resolved and compared once the model is loaded
        new["model.dtype"] = old["model.dtype"]
    missing = object()
    changed = [
        key
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing) and not is_free(key)
    ]
    if changed:
        raise UserError(f"{run}: was started with different settings: {listed(changed, old, new)}; start a new run")


def _verifiers(config: Config) -> dict[str, Any]:
    """The verifiers with their weights, without their time limits, which may change."""
    entries = config.reward.verifiers
    weighted = (e.verifier if e.weight == 1 else f"{e.weight!r} × {e.verifier}" for e in entries)
    return {"reward.verifier": ", ".join(weighted)}


def listed(keys: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], most: int = 5) -> str:
    """`key old → new` for the first keys, and the number of further ones."""
    first = ", ".join(f"{key} {cut(str(old.get(key)), 80)} → {cut(str(new.get(key)), 80)}" for key in keys[:most])
    return first + (f" and {len(keys) - most} more" if len(keys) > most else "")


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys."""
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
