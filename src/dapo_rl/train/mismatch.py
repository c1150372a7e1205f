"""How much the engine's log-probabilities differ from the trainer's, and a note for the user if it is much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from dapo_rl.choices import is_function
from dapo_rl.config import Config
from dapo_rl.engine_specs import engine_spec
from dapo_rl.objectives.kl import kl_penalty
from dapo_rl.types import Batch, BoolArray, FloatArray, Trajectory

LARGE_KL = 0.01
"""In nats per token. Log-probabilities then differ by 0.14 (root mean square), so that with the paper's bounds about a
tenth of the tokens are outside the clip range before the policy has changed."""
MANY_CLIPPED = 0.05
"""Share of tokens, or of sequences, that are clipped before the policy has changed."""


def newest_mismatch(batch: Batch, score: Callable[[Sequence[Trajectory]], list[FloatArray]]) -> float:
    """The KL divergence, in nats per token, on the fresh tokens of the batch's last group that has any, by `score`
    before the first update. NaN if all tokens were sampled with earlier weights."""
    for group in reversed(batch.groups):
        samples = [sample for sample in group.samples if is_fresh(sample).any()]
        if samples:
            logps = [s["proximal_logps"] for s in samples if "proximal_logps" in s.columns]
            behaviour, now = (
                np.concatenate([rows[is_fresh(s)] for s, rows in zip(samples, of, strict=True)])
                for of in ([s.logps for s in samples], logps if len(logps) == len(samples) else score(samples))
            )
            return kl_penalty(torch.from_numpy(behaviour), torch.from_numpy(now)).mean().item()
    return math.nan


def is_fresh(sample: Trajectory) -> BoolArray:
    """The tokens in the loss that come from the weights at the beginning of the step."""
    return sample.fresh & sample.loss_mask


class MismatchNote:
    """One note per process."""

    def __init__(self, config: Config) -> None:
        self._config, self._given = config, False

    def take(self, metrics: Mapping[str, float]) -> str | None:
        note = None if self._given else self._large(metrics) or self._clipped(metrics)
        self._given = self._given or note is not None
        return note

    def _clipped(self, metrics: Mapping[str, float]) -> str | None:
        """Clip bounds that are smaller than the mismatch. A function of the user may not clip at them."""
        algo, share = self._config.algo, metrics.get("rollout/mismatch_clipfrac", math.nan)
        if algo.old_policy == "recomputed" or is_function(algo.loss) or not share > MANY_CLIPPED:
            return None
        what = "sequences" if algo.per_sequence else "tokens"
        return (
            f"{share:.0%} of {what} are clipped before the policy has changed, by the difference between the engine's "
            f"and the trainer's log-probabilities alone; set algo.proximal=recomputed"
        )

    def _large(self, metrics: Mapping[str, float]) -> str | None:
        mismatch = metrics.get("rollout/mismatch_kl", math.nan)
        # With importance weights, the difference is corrected.
        if self._config.algo.importance_cap is not None or not mismatch > LARGE_KL:
            return None
        remedies = [] if self._config.model.dtype == "float32" else ["model.dtype=float32"]
        remedies += [] if engine_spec(self._config.engine).is_reference else ["engine=hf"]
        remedies += ["algo.proximal=recomputed with algo.importance_cap=2"]
        return (
            f"rollout/mismatch_kl is {mismatch:.2g}: the engine's log-probabilities differ from the trainer's by about "
            f"{math.sqrt(2 * mismatch):.2g} per token; remedies: {', or '.join(remedies)}"
        )
