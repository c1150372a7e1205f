"""The names that TRL and transformers give to metrics, for callbacks that look for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

TRL_NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/zero_std_share": "frac_reward_zero_std",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac_low": "clip_ratio/low_mean",
    "actor/pg_clipfrac_high": "clip_ratio/high_mean",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "timing_s/step": "step_time",
    "eval/reward": "eval_reward",
    "eval/accuracy": "eval_accuracy",
    "eval/response_length": "eval_completions/mean_length",
    "eval/truncated": "eval_completions/clipped_ratio",
}
"""A metric here, and the same metric there. TRL averages over the batch; here, `reward` and `completions/` are averages
over everything sampled in the step. Any other `eval/NAME` is also `eval_NAME`, and `reward/FUNCTION/mean` is also
`rewards/FUNCTION/mean`."""
BY_FUNCTION = re.compile(r"reward/.+/(mean|std)")


def with_trl_names(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics under both names; those that are missing or not finite are left out."""
    known = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    return known | {there: value for name, value in known.items() if (there := _trl_name(name)) is not None}


def _trl_name(name: str) -> str | None:
    if name in TRL_NAMES:
        return TRL_NAMES[name]
    if name.startswith("eval/"):
        return f"eval_{name.removeprefix('eval/')}"
    return f"rewards/{name.removeprefix('reward/')}" if BY_FUNCTION.fullmatch(name) else None
