"""Metrics of one update of the policy, from sums over the tokens of its micro-batches: KL, clipping, corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dapo_rl.config import AlgoSettings
from dapo_rl.objectives.aggregation import clipped_tokens
from dapo_rl.train.coefficients import KL_OF_UPDATE
from dapo_rl.train.learner import total


def clipping_sums(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    fresh: Tensor,
    per_sequence: bool,
    **bounds: Any,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of the policy's change since `old_logps`, and which bound clipped each token: the column `clipped`. `fresh`
    tokens come from the weights at the beginning of the step."""
    high, low, dual = clipped_tokens(logps, old_logps, advantages, mask, **bounds)
    probabilities = logps.exp()
    weighed, at_bound = _clippable(fresh, mask, advantages, high | low | dual, per_sequence)
    sums = {
        "prob": total(probabilities, mask),
        "ppo_kl": total(old_logps - logps, mask),
        "fresh": fresh.sum(),
        "fresh_weighed": weighed.sum(),
        "fresh_clipped": at_bound.sum(),
        "high": high.sum(),
        "high_prob": total(probabilities, high),
        "low": low.sum(),
        "dual": dual.sum(),
    }
    return sums, (high.to(torch.int8) + 2 * low.to(torch.int8) + 3 * dual.to(torch.int8)).to(torch.int8)


def update_metrics(totals: Mapping[str, float], tokens: int, algo: AlgoSettings) -> dict[str, float]:
    """`totals` of a mini-batch with so many tokens."""

    def mean(name: str) -> float:
        return totals.get(name, 0.0) / tokens

    metrics = {
        "actor/pg_loss": totals["pg_loss"],
        "actor/entropy": mean("entropy"),
        "actor/prob": mean("prob"),
        "actor/ppo_kl": mean("ppo_kl"),
        "actor/mismatch_kl": _ratio(totals, "mismatch_kl", "fresh"),
        "actor/mismatch_clipfrac": _ratio(totals, "fresh_clipped", "fresh_weighed"),
        "actor/pg_clipfrac": mean("high") + mean("low"),
        "actor/pg_clipfrac_high": mean("high"),
        "actor/pg_clipfrac_low": mean("low"),
        "actor/pg_clipfrac_lower": mean("dual"),
        "actor/clipped_high_prob": _ratio(totals, "high_prob", "high"),
    }
    if "kl_loss" in totals:
        metrics["actor/kl_loss"] = totals["kl_loss"]
    if "kl" in totals:
        metrics[KL_OF_UPDATE] = _ratio(totals, "kl", "kl_of")
    if algo.positive_lm_coef > 0:
        metrics["actor/positive_lm_loss"] = totals["lm_loss"]
    if algo.importance_cap is not None:
        metrics["rollout/is_weight_mean"] = mean("is_weight")
        metrics["rollout/is_above_cap_share"] = mean("above_cap")
    if algo.off_policy_mask_threshold is not None:
        metrics["actor/opsm_clipfrac"] = _ratio(totals, "opsm", "opsm_of")
    return metrics


def _ratio(totals: Mapping[str, float], part: str, whole: str) -> float:
    """NaN if the whole is 0."""
    return totals[part] / totals[whole] if totals.get(whole) else math.nan


def _clippable(
    fresh: Tensor, mask: Tensor, advantages: Tensor, clipped: Tensor, per_sequence: bool
) -> tuple[Tensor, Tensor]:
    """Two masks: what clipping can act on (it has an advantage, and was sampled by the weights at the beginning of the
    step), and what it clipped. Each has an entry per token, or per sample with `per_sequence`."""
    weighed = fresh & (advantages != 0)
    if per_sequence:
        weighed = weighed.any(-1) & (fresh == mask).all(-1)
        clipped = clipped.any(-1)
    return weighed, weighed & clipped
