"""What a critic starts from: the policy, or a reward model."""

from __future__ import annotations

from typing import Any

import torch

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_reward_model
from dapo_rl.models.values import value_model, value_model_from


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
