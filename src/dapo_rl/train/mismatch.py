"""A note for the user if the engine's log-probabilities and the trainer's differ much."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dapo_rl.config import Config

LARGE_KL = 0.01
"""In nats per token. Log-probabilities then differ by 0.14 (root mean square), so that with the paper's bounds about a
tenth of the tokens are outside the clip range before the policy has changed."""


class MismatchNote:
    """The note is given once per process."""

    def __init__(self, config: Config) -> None:
        self._config, self._given = config, False

    def take(self, metrics: Mapping[str, float]) -> str | None:
        """The note, if a step with these metrics is the first that needs it."""
        mismatch = metrics.get("rollout/mismatch_kl", math.nan)
        # With importance weights, the difference is corrected.
        if self._given or self._config.algo.importance_cap is not None or not mismatch > LARGE_KL:
            return None
        self._given = True
        remedies = [] if self._config.model.dtype == "float32" else ["model.dtype=float32"]
        remedies += [] if self._config.engine == "hf" else ["engine=hf"]
        remedies += ["algo.proximal=recomputed with algo.importance_cap=2"]
        return (
            f"rollout/mismatch_kl is {mismatch:.2g}: the engine's log-probabilities differ from the trainer's by about "
            f"{math.sqrt(2 * mismatch):.2g} per token; remedies: {', or '.join(remedies)}"
        )
