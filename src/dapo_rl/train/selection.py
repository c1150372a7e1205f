"""Transforms that select tokens of each mini-batch, so that the selection does not depend on micro-batches or ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dapo_rl.config import Config
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.objectives import LOSSES
from dapo_rl.objectives.selection import clip_cov_mask, kl_cov_mask, token_covariances, top_entropy_mask
from dapo_rl.types import Batch, Trajectory

Select = Callable[[Sequence[Trajectory], int], Tensor]
"""Which tokens of a mini-batch are selected, one after the other; the number is that of the mini-batch."""


def selects_by_covariance(config: Config) -> bool:
    entry = LOSSES.get(config.algo.loss)
    return entry is not None and entry.by_covariance


def with_entropy_mask(batch: Batch, config: Config) -> Batch:
    """The batch with the column `entropy_mask`: whether the token is one of those with the highest entropy."""

    def select(samples: Sequence[Trajectory], place: int) -> Tensor:
        return top_entropy_mask(
            _flat(samples, "entropy"), _flat(samples, "loss_mask"), config.algo.top_entropy_quantile
        )

    return _selected(batch, config, "entropy_mask", select)


def with_cov_mask(batch: Batch, config: Config) -> Batch:
    """The batch with the column `cov_mask`: whether Clip-Cov or KL-Cov selects the token, by the log-probabilities at
    the beginning of the step."""
    algo = config.algo

    def select(samples: Sequence[Trajectory], place: int) -> Tensor:
        mask = _flat(samples, "loss_mask")
        logps = "proximal_logps" if "proximal_logps" in samples[0].columns else "logps"
        covariances = token_covariances(_flat(samples, logps), _flat(samples, "advantages"), mask)
        if algo.loss == "kl-cov":
            return kl_cov_mask(covariances, mask, share=algo.cov_share)
        rng = np.random.default_rng(derive_seed(config.seed, "clip-cov", batch.step, place))
        order = torch.from_numpy(rng.random(len(mask)))
        how = {"share": algo.cov_share, "low": algo.clip_cov_low, "high": algo.clip_cov_high}
        return clip_cov_mask(covariances, mask, order, **how)

    return _selected(batch, config, "cov_mask", select)


def _selected(batch: Batch, config: Config, column: str, select: Select) -> Batch:
    """The batch with a column that says which tokens of its mini-batches are selected, and their share."""
    done: list[Trajectory] = []
    selected, tokens = 0, 0
    for place, part in enumerate(batch.mini_batches(config.train.mini_batches)):
        trained = [sample for sample in part if sample.trained_tokens]
        rows: list[Tensor] = []
        if trained:
            chosen = select(trained, place)
            selected, tokens = selected + int(chosen.sum()), tokens + sum(s.trained_tokens for s in trained)
            rows = list(chosen.split([len(sample.token_ids) for sample in trained]))
        own = iter(rows)
        done += [s.replace(**{column: next(own).numpy()}) if s.trained_tokens else s for s in part]
    metrics = {f"actor/{column}_share": selected / tokens} if tokens else {}
    return replace(batch.with_samples(done), metrics={**batch.metrics, **metrics})


def _flat(samples: Sequence[Trajectory], column: str) -> Tensor:
    rows = [sample.loss_mask if column == "loss_mask" else sample[column] for sample in samples]
    return torch.from_numpy(np.concatenate(rows))
