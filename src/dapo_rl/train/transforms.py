"""Batch transforms: what a step adds to its batch between sampling and the first update.

A transform is a function from a batch to a batch; it adds token columns to the trajectories. The built-in ones compute
log-probabilities under the proximal and the reference policy, advantages, and a critic's values with theirs, and then
reject off-policy tokens.
`train.transforms` adds functions of the user, which come last: `def transform(batch)` in a file, or
`def transform(batch, config)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from dapo_rl.base.load import load_function
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.train.batch import with_advantages
from dapo_rl.train.coefficients import Coefficients
from dapo_rl.train.custom import Advantages, taken_by
from dapo_rl.train.gae import with_values
from dapo_rl.train.off_policy import with_corrections
from dapo_rl.train.selection import selects_by_covariance, with_cov_mask, with_entropy_mask
from dapo_rl.train.teacher import Score, Teacher, with_teacher
from dapo_rl.types import Batch, FloatArray, Trajectory

Transform = Callable[[Batch], Batch]


class Scores(Protocol):
    """The part of a policy that transforms use."""

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]: ...

    def score_reference(self, samples: Sequence[Trajectory]) -> list[FloatArray]: ...

    def score_entropy(self, samples: Sequence[Trajectory]) -> list[FloatArray]: ...


def build_transforms(
    config: Config,
    policy: Scores,
    advantages: Advantages,
    values: Score | None = None,
    coefficients: Coefficients | None = None,
    teacher: Teacher | None = None,
) -> tuple[Transform, ...]:
    """The transforms of a run. `values` scores samples by the critic, if there is one; `coefficients` are those that
    change during the run, if any does."""
    transforms: list[Transform] = []
    if config.scores_first:
        transforms.append(after_pretraining(scored("proximal_logps", policy.score)))
    if config.algo.kl_coef > 0:
        transforms.append(scored("ref_logps", policy.score_reference))
    if teacher is not None:
        transforms.append(lambda batch: teacher.scored(batch, policy.score_reference))
    by_entropy = config.algo.top_entropy_quantile < 1
    if advantages.takes("entropy"):
        transforms.append(scored("entropy", policy.score_entropy))
    elif by_entropy:
        transforms.append(after_pretraining(scored("entropy", policy.score_entropy)))
    transforms.append(lambda batch: with_advantages(batch, advantages, config.env.turn_discount))
    if teacher is not None:
        transforms.append(lambda batch: with_teacher(batch, config.teacher.weight))
    if values is not None:
        transforms.append(lambda batch: with_values(batch, config, values, coefficients.kl if coefficients else None))
    if by_entropy:
        transforms.append(after_pretraining(lambda batch: with_entropy_mask(batch, config)))
    if selects_by_covariance(config):
        transforms.append(after_pretraining(lambda batch: with_cov_mask(batch, config)))
    if config.corrects_first:
        correct = partial(with_corrections, algo=config.algo, mini_batches=config.train.mini_batches)
        transforms.append(after_pretraining(correct))
    return (*transforms, *(CustomTransform(spec, config) for spec in config.train.transforms))


def scored(column: str, score: Score) -> Transform:
    """Adds a column with the scores of the trajectories in the loss."""

    def transform(batch: Batch) -> Batch:
        rows = zip(batch.trained, score(batch.trained), strict=True)
        return batch.with_trained(sample.replace(**{column: row}) for sample, row in rows)

    return transform


def after_pretraining(transform: Transform) -> Transform:
    """Leaves the batches alone that train the critic only."""
    return lambda batch: transform(batch) if batch.trains_policy else batch


class CustomTransform:
    """A function of the user. It is checked at each call, and every failure is a one-line error."""

    def __init__(self, spec: str, config: Config) -> None:
        self._name = f"train.transforms: {spec}"
        self._function = load_function(spec)
        self._more = taken_by(self._function, {"config": config}, only_named=True)

    def __call__(self, batch: Batch) -> Batch:
        try:
            result = self._function(batch, **self._more)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # includes SystemExit
            raise UserError(f"{self._name} raised {describe(error)}", describe_traceback(error)) from error
        if not isinstance(result, Batch):
            raise UserError(f"{self._name} returned a {type(result).__name__}; it returns the batch with more columns")
        before, after = batch.samples, result.samples
        same = len(before) == len(after) and all(
            np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=False)
        )
        if not same:
            raise UserError(f"{self._name} changed the tokens of the batch; it adds columns and leaves tokens alone")
        kinds: dict[str, Any] = {}
        for sample in after:
            for name, array in sample.columns.items():
                kind = array.dtype, array.shape[1:]
                if kinds.setdefault(name, kind) != kind:
                    raise UserError(f"{self._name} made {name} of several types or shapes; give all samples the same")
                if array.dtype.kind == "f" and not np.isfinite(array[sample.loss_mask]).all():
                    raise UserError(f"{self._name} made {name} not finite")
        return replace(result, metrics={name: self._number(name, value) for name, value in result.metrics.items()})

    def _number(self, name: str, value: Any) -> float:
        """A metric as checkpoints and the log have it: of an array library, its plain number."""
        if type(value) in (int, float):
            return value  # type: ignore[no-any-return]
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{self._name}: the metric {name} is a {type(value).__name__}, not a number") from None
