"""Coefficients that change during a run. Their state is in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from dapo_rl.base.saved import Finite, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.config import AlgoSettings
from dapo_rl.objectives.controllers import applied_entropy_coef, next_entropy_coef, next_kl_coef

FILE = "coefficients.json"
KL_OF_UPDATE, KL_OF_REWARD = "actor/kl", "actor/reward_kl_penalty"
"""What the weight of the KL penalty follows: the mean over samples of the mean of their tokens' estimates, which an
update measures, or a batch whose rewards have the penalty."""


class Coefs(NamedTuple):
    entropy: float
    kl: float

    @classmethod
    def of(cls, algo: AlgoSettings) -> Coefs:
        return cls(algo.entropy_coef, algo.kl_coef if algo.kl_in == "loss" else 0.0)


class SavedCoefficients(Saved):
    entropy_coef: Finite
    entropy: Finite | None
    kl_coef: Finite | None = None

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        yield "entropy_coef", self.entropy_coef < 0
        yield "kl_coef", self.kl_coef is not None and self.kl_coef < 0


class Coefficients:
    """Follows what updates and batches measure; a part of the checkpoint."""

    _entropy_coef: float
    _kl_coef: float
    _entropy: float
    """Of the last update. Before the first, none is known to be too low."""

    def __init__(self, algo: AlgoSettings) -> None:
        self._algo = algo
        self._begin()

    @classmethod
    def of(cls, algo: AlgoSettings) -> Coefficients | None:
        """None if no coefficient changes."""
        return None if algo.entropy_target is None and algo.kl_target is None else cls(algo)

    @property
    def now(self) -> Coefs:
        coefs = Coefs(self._entropy_coef, self.kl if self._algo.kl_in == "loss" else 0.0)
        target = self._algo.entropy_target
        if target is None:
            return coefs
        return coefs._replace(entropy=applied_entropy_coef(coefs.entropy, self._entropy, target))

    @property
    def kl(self) -> float:
        """The weight of the KL penalty, in the loss or in the reward."""
        return self._kl_coef

    def follow(self, metrics: Mapping[str, float], samples: int) -> None:
        """Takes the metrics of an update or of a batch, and the number of its samples in the loss; there are no metrics
        if there are none."""
        algo = self._algo
        if algo.entropy_target is not None and "actor/entropy" in metrics:
            self._entropy = metrics["actor/entropy"]
            step = {"delta": algo.entropy_coef_delta, "highest": algo.entropy_coef_max}
            self._entropy_coef = next_entropy_coef(self._entropy_coef, self._entropy, algo.entropy_target, **step)
        measured = KL_OF_UPDATE if algo.kl_in == "loss" else KL_OF_REWARD
        if algo.kl_target is not None and measured in metrics:
            kl, horizon = metrics[measured], algo.kl_horizon
            self._kl_coef = next_kl_coef(self._kl_coef, kl, algo.kl_target, samples=samples, horizon=horizon)

    def save(self, directory: Path) -> None:
        entropy = None if math.isinf(self._entropy) else self._entropy
        state: dict[str, float | None] = {"entropy_coef": self._entropy_coef, "entropy": entropy}
        if self._algo.kl_target is not None:
            state["kl_coef"] = self._kl_coef
        write_state(directory / FILE, state)

    def load(self, directory: Path) -> None:
        """A checkpoint without a coefficient is of a run in which it did not change: it starts from the settings."""
        self._begin()
        if not (path := directory / FILE).exists():
            return
        with restoring(path):
            state = parse_state(SavedCoefficients, read_state(path))
        if self._algo.entropy_target is not None:
            self._entropy_coef = state.entropy_coef
            self._entropy = math.inf if state.entropy is None else state.entropy
        if self._algo.kl_target is not None and state.kl_coef is not None:
            self._kl_coef = state.kl_coef

    def _begin(self) -> None:
        self._entropy_coef, self._kl_coef, self._entropy = self._algo.entropy_coef, self._algo.kl_coef, math.inf
