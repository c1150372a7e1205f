"""The metrics of one step, with verl's names where verl has the same metric.

Reward, accuracy and length are averages over *everything sampled* in the step: the groups that dynamic sampling keeps
are partly correct by construction and would show no progress. So is `reward/NAME/mean`, the curve of a reward function,
as in TRL, and `data/SOURCE/accuracy` of an entry of a list of sources. Metrics of the trained batch are under `actor/`
and `…/batch`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from torch import Tensor

from dapo_rl.envs.protocol import FailureReason
from dapo_rl.outcomes import Outcome
from dapo_rl.rollout.batch_builder import SampledBatch
from dapo_rl.rollout.failures import failure_reason
from dapo_rl.types import MOST_LOGGED, Batch, Group, Trajectory, Verdict

OF_EPISODES = {
    "turns": "turns",
    "tool_calls": "tool_calls",
    "tool_errors": "tool_errors",
    "wait_s": "env_wait_s",
    "forks": "forks",
    "failed": "env_failed",
}
"""Metrics of episodes, as their trajectories have them."""


def step_metrics(
    fill: SampledBatch,
    batch: Batch,
    updates: Sequence[Mapping[str, float]],
    rewards: Mapping[int, Tensor],
    mismatch: float = math.nan,
) -> dict[str, float]:
    """`rewards` contains the rewards of all groups of the step, by draw; `mismatch` stands in for the first update's if
    that had no fresh tokens."""
    trained = sum(s.trained_tokens for s in batch.samples)
    outcomes = fill.outcomes()
    drawn = len(fill.sampled)
    metrics = {
        **_sampled(fill.sampled, rewards),
        **_by_function([verdict for group in fill.sampled for verdict in group.verdicts]),
        "reward/batch": _mean([s.scalars["reward"] for group in batch for s in group.samples]),
        "acc/batch": _mean([float(v.correct) for group in batch for v in group.verdicts]),
        **_episodes([pair for group in fill.sampled for pair in group.judged]),
        **_by_source(fill),
        "sampling/drawn": drawn,
        **{f"sampling/{outcome}": outcomes[outcome] for outcome in get_args(Outcome)},
        "sampling/all_correct_share": _share(sum(all(v.correct for v in g.verdicts) for g in fill.sampled), drawn),
        "sampling/all_wrong_share": _share(sum(not any(v.correct for v in g.verdicts) for g in fill.sampled), drawn),
        "sampling/filled_up": len(fill.filled_up),
        "sampling/carried": fill.carried_over,
        "sampling/in_flight": fill.in_flight,
        "sampling/tokens_generated": fill.tokens_generated,
        "sampling/tokens_trained": trained,
        "sampling/wasted_share": _share(sum(group.tokens for group, _ in fill.dropped), fill.tokens_generated),
        "sampling/staleness": max(_staleness(fill), default=0),
        "sampling/staleness_mean": _mean(_staleness(fill)),
        **mean_of(updates),
        "actor/updates": len(updates),
    }
    # Before the first update the policy is the one that sampled, so this measures the difference between the engine's
    # and the trainer's numerics.
    first = updates[0]["actor/mismatch_kl"] if updates else math.nan
    metrics["rollout/mismatch_kl"] = mismatch if math.isnan(first) else first
    metrics.pop("actor/mismatch_kl", None)
    metrics["rollout/mismatch_clipfrac"] = updates[0].get("actor/mismatch_clipfrac", math.nan) if updates else math.nan
    metrics.pop("actor/mismatch_clipfrac", None)
    return metrics


def _sampled(groups: Sequence[Group], rewards: Mapping[int, Tensor]) -> dict[str, float]:
    samples = [
        (sample, verdict, reward)
        for group in groups
        for sample, verdict, reward in zip(group.samples, group.verdicts, rewards[group.draw].tolist(), strict=True)
    ]
    judged = [(verdict, reward) for _, verdict, reward in samples if not verdict.failed]
    lengths = [length for group in groups for length in group.lengths]
    return {
        "reward/mean": _mean([reward for _, reward in judged]),
        "reward/std": float(np.std([reward for _, reward in judged], ddof=1)) if len(judged) > 1 else math.nan,
        "reward/zero_std_share": _share(sum(len(set(rewards[g.draw].tolist())) == 1 for g in groups), len(groups)),
        "acc/mean": _mean([float(verdict.correct) for verdict, _ in judged]),
        "response_length/mean": _mean([float(n) for n in lengths]),
        "response_length/max": max(lengths, default=0),
        "response_length/clip_ratio": _share(sum(s.truncated for s, _, _ in samples), len(samples)),
    }


def _episodes(judged: Sequence[tuple[Trajectory, Verdict]]) -> dict[str, float]:
    """Means over episodes; nothing in a run without an environment. `env/failed` is the sum of its reasons."""
    episodes = [(sample, verdict) for sample, verdict in judged if "turns" in sample.scalars]
    if not episodes:
        return {}
    means = {name: _mean([s.scalars.get(scalar, 0.0) for s, _ in episodes]) for name, scalar in OF_EPISODES.items()}
    failures = Counter(failure_reason(sample, verdict) for sample, verdict in episodes)
    means |= {f"failed_{reason}": failures[reason] / len(episodes) for reason in get_args(FailureReason)}
    return {f"env/{name}": mean for name, mean in means.items()}


def _by_source(fill: SampledBatch) -> dict[str, float]:
    """For each entry of a list of sources: accuracy and tokens of what was sampled, and, of the groups that were kept
    or dropped in this step, the share of those with a signal. Nothing in a run without a list."""
    decided = [(group, group.draw not in fill.filled_up) for group in fill.kept]
    decided += [(group, outcome == "surplus") for group, outcome in fill.dropped]
    metrics: dict[str, float] = {}
    for origin in sorted({group.prompt.origin for group in fill.sampled} - {""}):
        own = [group for group in fill.sampled if group.prompt.origin == origin]
        signals = [signal for group, signal in decided if group.prompt.origin == origin]
        metrics |= {
            f"data/{origin}/accuracy": _mean([float(v.correct) for g in own for v in g.verdicts if not v.failed]),
            f"data/{origin}/kept_share": _share(sum(signals), len(signals)),
            f"data/{origin}/tokens": sum(group.tokens for group in own),
        }
    return metrics


def _by_function(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The unweighted scores of each reward function (`reward/NAME/…`), and what the functions log (`metric/NAME`)."""
    scores: dict[str, list[float]] = {}
    logged: dict[str, tuple[float, int]] = {}
    for verdict in verdicts:
        for part in () if verdict.failed else verdict.parts:
            scores.setdefault(part.name, []).append(part.score)
        for name, (total, count) in verdict.metrics.items():
            before = logged.get(name, (0.0, 0))
            logged[name] = (before[0] + total, before[1] + count)
    metrics: dict[str, float] = {}
    for name in sorted(scores)[:MOST_LOGGED]:
        metrics |= {f"reward/{name}/mean": _mean(scores[name]), f"reward/{name}/std": _std(scores[name])}
    for name in sorted(logged)[:MOST_LOGGED]:
        total, count = logged[name]
        metrics[f"metric/{name}"] = total / count
    return metrics


def _staleness(fill: SampledBatch) -> list[float]:
    """How many weight versions old the first token of each sample in the batch is."""
    return [float(fill.version - s.versions[0]) for group in fill.kept for s in group.samples]


def mean_of(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step; NaN values are skipped."""
    names = updates[0] if updates else {}
    return {name: _mean([u[name] for u in updates if not math.isnan(u[name])]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """With Bessel's correction, as TRL has it."""
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
