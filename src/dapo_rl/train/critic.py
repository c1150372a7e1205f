"""The critic: learns what the policy's states are worth, with an optimizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_rl.base.hashing import DeferredWrite, Digests, IsCancelled
from dapo_rl.config import TrainSettings
from dapo_rl.errors import NonFiniteError
from dapo_rl.models.device import to_device
from dapo_rl.models.finite import not_finite
from dapo_rl.models.response_logps import ResponsePass
from dapo_rl.models.save import done_now, save_hashed
from dapo_rl.models.values import ResponseValues, TokenValues
from dapo_rl.objectives.critic import value_loss
from dapo_rl.train.learner import Learner, padded, read_checkpoint, total
from dapo_rl.types import FloatArray, Trajectory, Update

FILE = "critic.pt"


class HFCritic(Learner[TokenValues]):
    """A `value_model` that is trained in this process."""

    whose = "the critic's"
    copies = 2  # the policy is as large, and is copied as well

    def __init__(
        self,
        model: Any,
        *,
        pad_id: int,
        train: TrainSettings,
        token_budget: int,
        value_clip: float | None = None,
        time_share: bool = False,
        longest: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`train.packed` is what the policy has found possible. `value_clip` is that of `value_loss`."""
        self._value_clip = value_clip
        how: dict[str, Any] = {"pad_id": pad_id, "dtype": dtype, "longest": longest}
        super().__init__(model, train=train, token_budget=token_budget, fill_memory=False, time_share=time_share, **how)

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The value of the state before each response token."""

        def values(batch: Sequence[Trajectory]) -> Tensor:
            with self._responses.compute(batch) as stats:
                return stats.values

        return self._results(samples, values)

    def update(self, samples: Sequence[Trajectory], lr: float) -> Update:
        """One optimizer step towards the samples' returns."""
        tokens, nothing = self._count(samples).tokens, (None,) * len(samples)
        if tokens == 0:
            return Update({}, nothing)
        trained = [sample for sample in samples if sample.trained_tokens]
        totals, _, grad_norm = self._learn(trained, lr, lambda batch, _: self._backward(batch, tokens))
        metrics = {"critic/vf_loss": totals["loss"], "critic/grad_norm": grad_norm, "critic/lr": lr}
        if self._value_clip is not None:
            metrics["critic/vf_clipfrac"] = totals["clipped"] / tokens
        return Update(metrics, nothing, self._take_notes())

    def save(self, directory: Path) -> DeferredWrite:
        """Copies the weights and the state of the optimizer; the result writes them to `critic.pt`."""
        state = {
            "weights": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "lowered_budget": self._lowered_budget,
        }
        if name := not_finite(state):
            raise NonFiniteError(f"the critic is not finite, in {name}")
        copied = state if self._copies is None else self._copies.take(state)

        def write(is_cancelled: IsCancelled) -> Digests:
            return {FILE: save_hashed(copied, directory / FILE, is_cancelled)}

        return write if self._copies is not None else done_now(write)

    def load(self, directory: Path) -> None:
        """Loads what `save` wrote. A NonFiniteError leaves the critic unchanged."""
        with read_checkpoint(directory):
            state = torch.load(directory / FILE, map_location="cpu", weights_only=True)
            weights = state.pop("weights")
        self._restore(directory, weights, state)

    def _pass_of(self, model: Any, **how: Any) -> ResponsePass[TokenValues]:
        return ResponseValues(model, **how)

    def _backward(self, samples: Sequence[Trajectory], tokens: int) -> tuple[dict[str, Tensor], _Nothing]:
        """Accumulates the gradient of one micro-batch."""
        device = self._responses.device
        old = to_device(padded([_given(s, "values") for s in samples]), device)
        targets = to_device(padded([_given(s, "returns") for s in samples]), device)
        in_loss = to_device(padded([s.loss_mask for s in samples]), device)
        with self._responses.compute(samples) as stats:
            values, mask = stats.values, stats.mask & in_loss
            loss = value_loss(values, old, targets, mask, clip=self._value_clip, denominator=tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        sums = {"loss": loss.detach()}
        if (clip := self._value_clip) is not None:
            limited = old + (values.detach() - old).clamp(-clip, clip)
            sums["clipped"] = total((limited - targets).square() > (values.detach() - targets).square(), mask)
        return sums, _Nothing()


class _Nothing:
    """The critic reports nothing for single tokens."""

    def split(self, lengths: Sequence[int]) -> list[None]:
        return [None] * len(lengths)


def _given(sample: Trajectory, column: str) -> FloatArray:
    """Zeros for the placeholder of a rank without samples."""
    values = sample.get(column)
    return np.zeros(len(sample.token_ids), np.float32) if values is None else values
