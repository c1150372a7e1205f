"""A critic: a model with one output, the value of each state, instead of an output for each token of the vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dapo_rl.models.packing import Packed, Reads
from dapo_rl.models.response_logps import ResponsePass, in_rows, padded_inputs, predicting_states
from dapo_rl.types import Trajectory


class TokenValues(NamedTuple):
    values: Tensor
    """`[B, R]`, differentiable: the value of the state before each response token."""
    mask: Tensor
    """`[B, R]`: True for response tokens."""


def value_model(model: Any) -> Any:
    """A copy of a causal language model with a scalar head, which is 0 at first: before it has learnt anything, the
    critic expects nothing."""
    critic = copy.deepcopy(model).requires_grad_(True)
    critic.config.tie_word_embeddings = False
    output = critic.get_output_embeddings().weight
    head = nn.Linear(output.shape[1], 1, device=output.device, dtype=output.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    critic.set_output_embeddings(head)
    return critic


def value_model_from(reward_model: Any, model: Any) -> Any:
    """A critic that starts as a reward model of the same architecture: with its backbone, and its score as the head.
    Raises ValueError if it has another architecture."""
    critic = value_model(model)
    head = getattr(reward_model, "score", None)
    if not isinstance(head, nn.Linear) or head.weight.shape != critic.get_output_embeddings().weight.shape:
        raise ValueError(f"the head of {type(reward_model).__name__} is not a linear layer of the policy's width")
    own, given = critic.base_model.state_dict(), reward_model.base_model.state_dict()
    if own.keys() != given.keys():
        raise ValueError(f"its weights are not those of the policy: {min(own.keys() ^ given.keys())} is in one alone")
    for name, weight in own.items():
        if weight.shape != given[name].shape:
            raise ValueError(f"{name} is {list(given[name].shape)}, and the policy's {list(weight.shape)}")
    critic.base_model.load_state_dict(given)
    with torch.no_grad():
        critic.get_output_embeddings().weight.copy_(head.weight)
        if head.bias is not None:
            critic.get_output_embeddings().bias.copy_(head.bias)
    return critic


class ResponseValues(ResponsePass[TokenValues]):
    """Computes the values of the states in which response tokens were chosen."""

    def _packed(self, row: Packed, predictors: Reads, samples: Sequence[Trajectory]) -> TokenValues:
        return TokenValues(*in_rows(samples, self._values(predicting_states(self._model, row, predictors))))

    def _padded(self, samples: Sequence[Trajectory]) -> TokenValues:
        inputs, mask_BR = padded_inputs(samples, self._pad_id, self.device)
        model = self._model
        # Some classes do not name their base model, which then is the whole model.
        backbone = model.base_model if model.base_model is not model else model.model
        hidden_BTH = backbone(**inputs, use_cache=False).last_hidden_state
        # The state before a token is that of the token before it.
        values_BR = self._values(hidden_BTH[:, -mask_BR.shape[1] - 1 : -1])
        return TokenValues(torch.where(mask_BR, values_BR, 0.0), mask_BR)

    def _values(self, hidden: Tensor) -> Tensor:
        """In float32: targets that differ by little must not become the same."""
        head = self._model.get_output_embeddings()
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float()).squeeze(-1)

    def _why_not_packed(self, longest: int) -> str | None:
        return None  # the policy has found out
