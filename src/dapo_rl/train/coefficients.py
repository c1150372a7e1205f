"""Coefficients of the loss that change during a run. Their state is in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from dapo_rl.base.saved import Finite, Saved, parse_state, read_state, restoring, write_state
from dapo_rl.config import AlgoSettings
from dapo_rl.objectives.controllers import applied_entropy_coef, next_entropy_coef

FILE = "coefficients.json"


class Coefs(NamedTuple):
    """The coefficients of one update."""

    entropy: float
    kl: float

    @classmethod
    def of(cls, algo: AlgoSettings) -> Coefs:
        """Those that the settings name."""
        return cls(algo.entropy_coef, algo.kl_coef if algo.kl_in == "loss" else 0.0)


class SavedCoefficients(Saved):
    entropy_coef: Finite
    entropy: Finite | None

    def contradictions(self) -> Iterable[tuple[str, bool]]:
        yield "entropy_coef", self.entropy_coef < 0


class Coefficients:
    """Follows what updates measure; a part of the checkpoint."""

    def __init__(self, algo: AlgoSettings) -> None:
        self._algo = algo
        self._coefs = Coefs.of(algo)
        self._entropy = math.inf
        """Of the last update. Before the first, none is known to be too low."""

    @classmethod
    def of(cls, algo: AlgoSettings) -> Coefficients | None:
        """None if no coefficient changes."""
        return None if algo.entropy_target is None else cls(algo)

    @property
    def now(self) -> Coefs:
        """For the next update."""
        target = self._algo.entropy_target
        if target is None:
            return self._coefs
        return self._coefs._replace(entropy=applied_entropy_coef(self._coefs.entropy, self._entropy, target))

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an update; there are none if nothing was in its loss."""
        algo = self._algo
        if algo.entropy_target is not None and "actor/entropy" in metrics:
            self._entropy = metrics["actor/entropy"]
            step = {"delta": algo.entropy_coef_delta, "highest": algo.entropy_coef_max}
            coef = next_entropy_coef(self._coefs.entropy, self._entropy, algo.entropy_target, **step)
            self._coefs = self._coefs._replace(entropy=coef)

    def save(self, directory: Path) -> None:
        entropy = None if math.isinf(self._entropy) else self._entropy
        write_state(directory / FILE, {"entropy_coef": self._coefs.entropy, "entropy": entropy})

    def load(self, directory: Path) -> None:
        """A checkpoint without the file is of a run in which no coefficient changed: they start from the settings."""
        self._coefs, self._entropy = Coefs.of(self._algo), math.inf
        if not (path := directory / FILE).exists():
            return
        with restoring(path):
            state = parse_state(SavedCoefficients, read_state(path))
        self._coefs = self._coefs._replace(entropy=state.entropy_coef)
        self._entropy = math.inf if state.entropy is None else state.entropy
