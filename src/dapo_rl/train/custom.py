"""The functions that `algo.loss` and `algo.advantage` name, built-in or custom.

Custom functions are checked at each call. Every failure is a one-line error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.base.load import load_function
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.choices import is_function
from dapo_rl.config import AlgoSettings
from dapo_rl.errors import UserError
from dapo_rl.objectives import ADVANTAGES, LOSSES, RatioOf
from dapo_rl.objectives.losses import TokenLosses, advantages_like, probability_ratio
from dapo_rl.train.learner import padded
from dapo_rl.types import Batch, RewardPart, Trajectory, Verdict

LENGTH = "length penalty"
"""The name of the length penalty among the rewards that a score is the sum of."""


def build_losses(algo: AlgoSettings) -> TokenLosses:
    if is_function(algo.loss):
        return CustomLoss(algo.loss)
    function = LOSSES[algo.loss].function
    own = {name: getattr(algo, name) for name in ("tau_pos", "tau_neg", "kl_cov_coef")}

    def losses(new_logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, **inputs: Any) -> Tensor:
        return function(new_logps, old_logps, advantages, mask, **taken_by(function, own | inputs))

    return losses


def build_ratio(algo: AlgoSettings) -> RatioOf:
    """The ratio that the clip bounds of `algo.loss` apply to; that of each token for a custom function."""
    return probability_ratio if is_function(algo.loss) else LOSSES[algo.loss].ratio_of


def build_advantages(algo: AlgoSettings, penalty_weight: float = 1.0) -> Advantages:
    """The advantage estimator that `algo.advantage` names. `penalty_weight` is that of the length penalty, for one that
    weighs rewards itself."""
    settings = {"normalize": algo.normalize, "ddof": algo.ddof, "eps": algo.advantage_eps}
    if is_function(algo.advantage):
        return CustomAdvantages(algo.advantage, settings)
    return BuiltInAdvantages(ADVANTAGES[algo.advantage].function, settings, penalty_weight)


def taken_by(function: Callable[..., Any], settings: Mapping[str, Any], only_named: bool = False) -> dict[str, Any]:
    """The settings that a function takes by name, or all if it takes any keyword and not `only_named`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    takes_all = not only_named and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD)
    names = {p.name for p in parameters if p.kind not in kinds}
    return {name: value for name, value in settings.items() if takes_all or name in names}


class _CustomFunction:
    def __init__(self, key: str, spec: str, returns: str) -> None:
        self._name, self._returns = f"{key}: {spec}", returns
        self._function = load_function(spec)

    def takes(self, name: str) -> bool:
        """Whether the function has a parameter of this name."""
        return bool(taken_by(self._function, {name: None}, only_named=True))

    def _call(self, tensors: Sequence[Tensor], inputs: Mapping[str, Any], or_shape: torch.Size | None = None) -> Tensor:
        """Calls the function with tensors, and the inputs that it has parameters for. It returns the shape of its first
        argument, or the other one."""
        with self._blamed():
            result = self._function(*tensors, **taken_by(self._function, inputs))
        shape, device = tensors[0].shape, tensors[0].device
        if not isinstance(result, Tensor):
            raise self._error(f"returned a {type(result).__name__}")
        if result.shape not in (shape, or_shape):
            raise self._error(f"returned the shape {list(result.shape)} for {list(shape)}")
        if not result.is_floating_point() or result.device != device:
            raise self._error(f"returned {result.dtype} on {result.device}")
        return result

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turns whatever the function raises, including SystemExit, into a UserError; out-of-memory errors pass."""
        try:
            yield
        except (UserError, KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            raise UserError(f"{self._name} raised {describe(error)}", describe_traceback(error)) from error

    def _error(self, what: str) -> UserError:
        return UserError(f"{self._name} {what}; it returns {self._returns}")


class CustomLoss(_CustomFunction):
    """`f(new_logps, old_logps, advantages, mask, **inputs)`, all `[B, T]`, with zeros where masked. By name it can take
    the clip bounds, and what `inputs` of `__call__` has."""

    def __init__(self, spec: str) -> None:
        super().__init__("algo.loss", spec, "a finite loss for each token, [B, T], with a gradient to new_logps")

    def __call__(
        self,
        new_logps: Tensor,
        old_logps: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        clip_ratio_c: float | None,
        **inputs: Tensor,
    ) -> Tensor:
        if not mask.any():  # the placeholder of a rank without samples, which the function need not know
            return new_logps.float() * 0
        # The function gets copies, so that it can modify them in place.
        new, old = (torch.where(mask, logps.float(), 0.0) for logps in (new_logps, old_logps))
        bounds = {"clip_low": clip_low, "clip_high": clip_high, "clip_ratio_c": clip_ratio_c}
        copies = {name: _copy(tensor, mask) for name, tensor in inputs.items() if self.takes(name)}
        losses = self._call((new, old, advantages_like(new, advantages, mask), mask.clone()), {**bounds, **copies})
        if not losses.requires_grad:
            raise self._error("returned losses without a gradient")
        self._check_finite(losses, new_logps, mask, "a loss that is not finite")
        return torch.where(mask, losses.float(), 0.0)

    def backward(self, loss: Tensor, logps: Tensor, entropy: Tensor) -> None:
        """`loss.backward()` in two parts, so that an error in the function's backward is reported as the function's."""
        inputs = [tensor for tensor in (logps, entropy) if tensor.requires_grad]
        with self._blamed():
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        found = [(tensor, g) for tensor, g in zip(inputs, gradients, strict=True) if g is not None]
        if not found:
            raise self._error("returned losses without a gradient")
        for tensor, gradient in found:
            everywhere = torch.ones_like(gradient, dtype=torch.bool)
            self._check_finite(gradient, tensor, everywhere, "losses whose gradient is not finite")
        torch.autograd.backward([tensor for tensor, _ in found], [gradient for _, gradient in found])

    def _check_finite(self, values: Tensor, logps: Tensor, mask: Tensor, what: str) -> None:
        """Raises if values are not finite although the log-probabilities are; if those are not, the model diverged."""
        good = (values.isfinite() | ~mask).all()
        if not good and bool((logps.isfinite() | ~mask).all()):
            raise self._error(f"returned {what}")


def _copy(tensor: Tensor, mask: Tensor) -> Tensor:
    if tensor.shape[:2] != mask.shape:
        return tensor.clone()
    whole = mask.view(*mask.shape, *[1] * (tensor.dim() - 2))
    return torch.where(whole, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


class BuiltInAdvantages:
    """Computes advantages `[P, G]`, or `[P, G, T]` for each token, from rewards `[P, G]`, a mask of the samples in the
    baseline (None: all), the numbers of tokens that the policy wrote (None: 1 each), and the batch."""

    def __init__(self, function: Callable[..., Tensor], settings: Mapping[str, Any], penalty_weight: float) -> None:
        self._function, self._settings, self._penalty_weight = function, settings, penalty_weight

    def __call__(
        self, rewards: Tensor, mask: Tensor | None, lengths: Tensor | None = None, batch: Batch | None = None
    ) -> Tensor:
        inputs: dict[str, Any] = {"lengths": torch.ones_like(rewards) if lengths is None else lengths}
        if batch is not None and taken_by(self._function, {"parts": None}):
            inputs |= part_tensors(batch, self._penalty_weight)
        return self._function(rewards, mask=mask, **taken_by(self._function, inputs | dict(self._settings)))

    def takes(self, name: str) -> bool:
        """Built-in estimators use no columns of the batch."""
        return False


class CustomAdvantages(_CustomFunction):
    """`f(rewards, mask, **inputs)`, `[P, G]`. The advantages of samples outside the mask are set to 0. By name it can
    take settings, `lengths`, and tensors of the batch: see `batch_tensors`."""

    def __init__(self, spec: str, settings: Mapping[str, Any]) -> None:
        super().__init__("algo.advantage", spec, "a finite advantage for each sample, [P, G], or token, [P, G, T]")
        self._settings = settings

    def __call__(
        self, rewards: Tensor, mask: Tensor | None, lengths: Tensor | None = None, batch: Batch | None = None
    ) -> Tensor:
        counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool().clone()
        tokens = torch.ones_like(rewards) if lengths is None else lengths.clone()
        inputs: dict[str, Any] = {"lengths": tokens, **self._settings}
        per_token = None
        if batch is not None:
            per_token = torch.Size((*rewards.shape, max(len(sample.token_ids) for sample in _episodes(batch))))
            inputs = batch_tensors(batch, self.takes) | inputs
        result = self._call((rewards.float().clone(), counted.clone()), inputs, per_token)
        whole = counted if result.dim() == counted.dim() else counted[..., None]
        advantages = torch.where(whole, result.float(), 0.0)
        if not advantages.isfinite().all():
            raise self._error("returned an advantage that is not finite")
        return advantages.detach()


Advantages = BuiltInAdvantages | CustomAdvantages


def _episodes(batch: Batch) -> list[Trajectory]:
    return [sample for group in batch.groups for sample in group.samples]


def batch_tensors(batch: Batch, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of the batch whose names are wanted: `correct` and `truncated`, `[P, G]`; `response_mask`, which is
    True for tokens that the policy wrote, `behaviour_logps`, and token columns by their names, `[P, G, T]`. They are 0
    after the end of a sample, and in samples that have no such column."""
    samples, shape = _episodes(batch), (len(batch.groups), -1)
    tensors = {
        name: torch.tensor([getattr(sample, name) for sample in samples]).view(shape)
        for name in ("correct", "truncated")
        if wanted(name)
    }
    columns = {name: name for sample in samples for name in sample.columns if name != "mask"}
    for name, column in {**columns, "response_mask": "mask", "behaviour_logps": "logps"}.items():
        if wanted(name):
            like = next(row for sample in samples if (row := sample.get(column)) is not None)
            rows = [sample.get(column) for sample in samples]
            ends = [(len(sample.token_ids), *like.shape[1:]) for sample in samples]
            table = padded(
                [np.zeros(end, like.dtype) if row is None else row for row, end in zip(rows, ends, strict=True)]
            )
            tensors[name] = torch.from_numpy(table.reshape(len(batch.groups), -1, *table.shape[1:]))
    return tensors


def part_tensors(batch: Batch, penalty_weight: float = 1.0) -> dict[str, Tensor]:
    """`parts[P, G, K]`, the scores of each reward function without their weights, NaN where one did not apply, and
    `part_weights[P, G, K]`. The length penalty is a reward with the weight given."""
    rows = [
        [{part.name: part for part in _parts(sample, verdict, penalty_weight)} for sample, verdict in pairs]
        for pairs in (zip(group.samples, group.verdicts, strict=True) for group in batch.groups)
    ]
    names = list(dict.fromkeys(name for of_group in rows for of_sample in of_group for name in of_sample))
    absent = RewardPart("", math.nan, 0.0)
    found = [[[of_sample.get(name, absent) for name in names] for of_sample in of_group] for of_group in rows]
    return {
        "parts": torch.tensor([[[part.score for part in row] for row in of_group] for of_group in found]),
        "part_weights": torch.tensor([[[part.weight for part in row] for row in of_group] for of_group in found]),
    }


def _parts(sample: Trajectory, verdict: Verdict, penalty_weight: float) -> tuple[RewardPart, ...]:
    parts = verdict.parts or (RewardPart("verifier", verdict.score),)
    return (*parts, RewardPart(LENGTH, sample.scalars["length_penalty"], penalty_weight))
