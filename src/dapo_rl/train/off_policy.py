"""What a step decides about off-policy tokens before its first update: which are rejected, and how importance weights
are normalised. Updates, micro-batches and ranks take it from the batch. And metrics of how far the policies are apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.config import AlgoSettings, Config
from dapo_rl.objectives.importance import (
    chi_squared,
    effective_sample_size,
    importance_ratio,
    importance_weights,
    weight_scale,
)
from dapo_rl.objectives.kl import kl_penalty
from dapo_rl.objectives.rejection import rejected_tokens
from dapo_rl.types import Batch, BoolArray, FloatArray, Trajectory

SCALE = "importance_scale"
"""The scalar of a trajectory that multiplies its importance weights."""
LEFT_OUT = "off_policy_tokens"
"""The scalar that counts its tokens that are not in the loss because they are stale or rejected."""


def with_corrections(batch: Batch, algo: AlgoSettings, mini_batches: int) -> Batch:
    """The batch, scored by the proximal policy, without what `algo.reject` rejects, and with the scales of normalised
    weights. Its metrics are those of all tokens that were in the loss before."""
    scored = batch.trained
    if not scored:
        return batch
    metrics = off_policy_metrics(scored, [s["proximal_logps"] for s in scored], algo)
    if algo.reject:
        rejected = [_rejected(sample, algo) for sample in scored]
        metrics |= _rejection_metrics(scored, rejected)
        batch = batch.with_trained(without(s, of_s) for s, of_s in zip(scored, rejected, strict=True))
    if algo.importance_normalize:
        batch = batch.with_samples(s for part in batch.mini_batches(mini_batches) for s in _normalized(part, algo))
    return replace(batch, metrics={**batch.metrics, **metrics})


def with_off_policy_metrics(batch: Batch, config: Config) -> Batch:
    """The batch after its updates, with the metrics of `with_corrections` if that had nothing to do, but there are
    importance weights. A single update starts from the proximal policy, so that nothing was scored for it."""
    trained = batch.trained
    if config.algo.importance_cap is None or not trained or not batch.trains_policy or config.corrects_first:
        return batch
    column = "proximal_logps" if config.scores_first else "train_logps"
    metrics = off_policy_metrics(trained, [sample[column] for sample in trained], config.algo)
    return replace(batch, metrics={**batch.metrics, **metrics})


def off_policy_metrics(
    samples: Sequence[Trajectory], proximal_logps: Sequence[FloatArray], algo: AlgoSettings
) -> dict[str, float]:
    """How far the proximal policy is from the one that sampled, over the tokens in the loss, with verl's names."""
    pairs = list(zip(samples, proximal_logps, strict=True))
    proximal = torch.cat([_rows(logps)[_mask(sample)] for sample, logps in pairs])
    behaviour = torch.cat([_rows(sample.logps)[_mask(sample)] for sample in samples])
    products = torch.stack([_product(*pair) for pair in pairs])
    metrics = {
        "kl": (behaviour - proximal).mean(),
        "k3_kl": kl_penalty(behaviour, proximal, "k3").mean(),
        "chi2_token": chi_squared(importance_ratio(proximal, behaviour)),
        "chi2_seq": chi_squared(products),
    }
    if (cap := algo.importance_cap) is not None:
        weights = _all_weights(pairs, algo)
        by_sample = algo.importance_level == "sequence"
        ratios = products if by_sample else importance_ratio(proximal, behaviour)
        metrics |= {
            "rollout_is_max": weights.max(),
            "rollout_is_min": weights.min(),
            "rollout_is_eff_sample_size": effective_sample_size(weights),
            "rollout_is_ratio_fraction_high": (ratios > cap).double().mean(),
            "rollout_is_ratio_fraction_low": (ratios < (algo.importance_floor or 1 / cap)).double().mean(),
        }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def without(sample: Trajectory, tokens: BoolArray) -> Trajectory:
    left_out = int(np.count_nonzero(sample.loss_mask & tokens))
    if not left_out:
        return sample
    before = sample.scalars.get(LEFT_OUT, 0)
    return sample.replace(loss_mask=sample.loss_mask & ~tokens, scalars={LEFT_OUT: before + left_out})


def without_stale_tokens(batch: Batch, version: int, most: int) -> Batch:
    """The batch without the tokens that were sampled more than `most` versions before its own, in its loss."""
    tokens = sum(sample.trained_tokens for sample in batch.trained)
    kept = batch.with_trained(without(sample, version - sample.versions > most) for sample in batch.trained)
    share = 1 - sum(sample.trained_tokens for sample in kept.trained) / tokens if tokens else math.nan
    return replace(kept, metrics={**batch.metrics, "rollout/stale_masked_share": share})


def _rejected(sample: Trajectory, algo: AlgoSettings) -> BoolArray:
    rows = _rows(sample["proximal_logps"]), _rows(sample.logps), _mask(sample)
    result: BoolArray = rejected_tokens(*rows, algo.reject).numpy()
    return result


def _rejection_metrics(samples: Sequence[Trajectory], rejected: Sequence[BoolArray]) -> dict[str, float]:
    tokens = sum(sample.trained_tokens for sample in samples)
    return {
        "rollout_corr/rollout_rs_masked_fraction": sum(int(of.sum()) for of in rejected) / tokens,
        "rollout_corr/rollout_rs_seq_masked_fraction": sum(bool(of.any()) for of in rejected) / len(samples),
    }


def _normalized(samples: Sequence[Trajectory], algo: AlgoSettings) -> Iterable[Trajectory]:
    """The samples of a mini-batch, those in the loss with a scale that brings the mean of their weights to 1."""
    pairs = [(sample, sample["proximal_logps"]) for sample in samples if sample.trained_tokens]
    scale = float(weight_scale(_all_weights(pairs, algo))) if pairs else 1.0
    return [sample.replace(scalars={SCALE: scale}) if sample.trained_tokens else sample for sample in samples]


def _all_weights(pairs: Sequence[tuple[Trajectory, FloatArray]], algo: AlgoSettings) -> Tensor:
    """The weights of all tokens, or with level `sequence` of all samples, before they are normalised."""

    def of_sample(sample: Trajectory, proximal: FloatArray) -> Tensor:
        weights = importance_weights(_rows(proximal), _rows(sample.logps), _mask(sample), **weight_bounds(algo))
        return weights[_mask(sample)][: 1 if algo.importance_level == "sequence" else None]

    return torch.cat([of_sample(*pair) for pair in pairs])


def weight_bounds(algo: AlgoSettings) -> dict[str, Any]:
    assert algo.importance_cap is not None
    bounds = {"cap": algo.importance_cap, "floor": algo.importance_floor or 0.0}
    return {**bounds, "mode": algo.importance_mode, "level": algo.importance_level}


def _product(sample: Trajectory, proximal: FloatArray) -> Tensor:
    ratios = importance_ratio(_rows(proximal), _rows(sample.logps), _mask(sample), "sequence")
    return ratios[_mask(sample)][0]


def _rows(values: FloatArray) -> Tensor:
    return torch.from_numpy(np.array(values))


def _mask(sample: Trajectory) -> Tensor:
    return torch.from_numpy(np.array(sample.loss_mask))
