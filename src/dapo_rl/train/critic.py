"""The critic: learns what the policy's states are worth, from a policy or a reward model, with its own optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dapo_rl.base.hashing import DeferredWrite
from dapo_rl.config import Config
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.finite import not_finite
from dapo_rl.models.load import load_reward_model
from dapo_rl.models.values import ResponseValues, TokenValues, value_model, value_model_from
from dapo_rl.objectives.critic import value_loss
from dapo_rl.train.learner import Learner, Tensors, read_checkpoint, total
from dapo_rl.types import FloatArray, Trajectory, Update

FILE = "critic.pt"


class HFCritic(Learner[TokenValues]):
    """A `value_model` that is trained in this process."""

    forward: ClassVar[Any] = ResponseValues
    whose = "the critic's"
    copies = 2  # the policy is as large, and is copied as well

    def __init__(self, model: Any, *, value_clip: float | None = None, **how: Any) -> None:
        """`value_clip` is that of `value_loss`; the others are the arguments of `Learner`."""
        self._value_clip = value_clip
        super().__init__(model, **how)

    def score(self, samples: Sequence[Trajectory]) -> list[FloatArray]:
        """The value of the state before each response token."""

        def values(batch: Sequence[Trajectory]) -> Tensor:
            with self._responses.compute(batch) as stats:
                return stats.values

        return self._results(samples, values)

    def update(self, samples: Sequence[Trajectory], lr: float) -> Update:
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
            "optimizer": self.optimizer.state_dict(),
            "lowered_budget": self._lowered_budget,
        }
        if name := not_finite(state):
            raise NonFiniteError(f"the critic is not finite, in {name}")
        return self._deferred(directory, {FILE: state})

    def load(self, directory: Path) -> None:
        with read_checkpoint(directory):
            state = torch.load(directory / FILE, map_location="cpu", weights_only=True)
            weights = state.pop("weights")
        self._restore(directory, weights, state)

    def _backward(self, samples: Sequence[Trajectory], tokens: int) -> tuple[Tensors, Tensors]:
        old, targets = self._column(samples, "values"), self._column(samples, "returns")
        in_loss = self._padded([s.loss_mask for s in samples])
        with self._responses.compute(samples) as stats:
            values, mask = stats.values, stats.mask & in_loss
            loss = value_loss(values, old, targets, mask, clip=self._value_clip, denominator=tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        sums = {"loss": loss.detach()}
        if (clip := self._value_clip) is not None:
            limited = old + (values.detach() - old).clamp(-clip, clip)
            sums["clipped"] = total((limited - targets).square() > (values.detach() - targets).square(), mask)
        return sums, {}


def first_critic(model: Any, tokenizer: Any, config: Config) -> Any:
    """The critic of a policy before it has learnt anything; raises a UserError for a reward model that it cannot be."""
    name = config.critic.model
    if name is None:
        return value_model(model)
    try:
        reward_model, own = load_reward_model(name, torch.device("cpu"), torch.float32)
        if own.get_vocab() != tokenizer.get_vocab():
            raise UserError(f"{name} has another vocabulary than {config.model.name}")
        return value_model_from(reward_model, model)
    except (UserError, ValueError) as error:
        raise UserError(f"critic.model: {error}", getattr(error, "more", "")) from None
