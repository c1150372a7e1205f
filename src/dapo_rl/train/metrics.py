"""The numbers of one step for the run log, under verl's names where verl has one.

Reward, accuracy and length are those of *everything sampled* in the step: the groups that dynamic sampling keeps are
half right by construction and would show no progress. What the update saw is under `actor/`, and as `…/batch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch

from dapo_rl.config import Config
from dapo_rl.fates import Fate
from dapo_rl.rollout.sampler import Fill
from dapo_rl.train.batch import shape_rewards
from dapo_rl.types import Batch, Group


def step_metrics(
    fill: Fill, batch: Batch, updates: Sequence[dict[str, float]], config: Config, version: int
) -> dict[str, float]:
    """`version` is that of the weights that the step began with."""
    trained = sum(len(s.response_ids) for group in batch.samples for s in group if s.in_loss)
    fates = fill.fates()
    drawn = len(fill.sampled)
    metrics = {
        **_sampled(fill.sampled, config),
        "reward/batch": _mean([score.reward for group in batch.scores for score in group]),
        "acc/batch": _mean([float(v.correct) for group in batch.groups for v in group.verdicts]),
        "sampling/drawn": drawn,
        **{f"sampling/{fate}": fates[fate] for fate in get_args(Fate)},
        "sampling/all_correct_share": _share(sum(all(v.correct for v in g.verdicts) for g in fill.sampled), drawn),
        "sampling/all_wrong_share": _share(sum(not any(v.correct for v in g.verdicts) for g in fill.sampled), drawn),
        "sampling/filled_up": len(fill.filled_up),
        "sampling/carried": fill.carried_over,
        "sampling/in_flight": fill.in_flight,
        "sampling/tokens_generated": fill.tokens_generated,
        "sampling/tokens_trained": trained,
        "sampling/wasted_share": _share(sum(group.tokens for group, _ in fill.dropped), fill.tokens_generated),
        "sampling/staleness": max(_staleness(batch, version), default=0),
        "sampling/staleness_mean": _mean(_staleness(batch, version)),
        **_mean_of(updates),
        "actor/updates": len(updates),
    }
    # Before the first update the policy is the one that sampled: what differs is how engine and trainer compute. A
    # first mini-batch of carried groups alone tells nothing.
    metrics["rollout/mismatch_kl"] = updates[0]["actor/mismatch_kl"] if updates else math.nan
    metrics.pop("actor/mismatch_kl", None)
    return metrics


def _sampled(groups: Sequence[Group], config: Config) -> dict[str, float]:
    samples = [(s, v) for group in groups for s, v in zip(group.samples, group.verdicts, strict=True)]
    judged = [(s, v) for s, v in samples if not v.failed]
    lengths = [len(s.token_ids) for s, _ in samples]
    rewards = shape_rewards(
        torch.tensor([v.score for _, v in judged]), torch.tensor([len(s.token_ids) for s, _ in judged]), config
    )
    return {
        "reward/mean": _mean(rewards.tolist()),
        "acc/mean": _mean([float(v.correct) for _, v in judged]),
        "response_length/mean": _mean([float(n) for n in lengths]),
        "response_length/max": max(lengths, default=0),
        "response_length/clip_ratio": _share(sum(s.truncated for s, _ in samples), len(samples)),
    }


def _staleness(batch: Batch, version: int) -> list[float]:
    """How many weight versions the first token of each sample is behind."""
    return [float(version - s.versions[0]) for group in batch.groups for s in group.samples]


def _mean_of(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over a step's updates of each metric that they have; a NaN says that an update has none."""
    names = updates[0] if updates else {}
    return {name: _mean([u[name] for u in updates if not math.isnan(u[name])]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
