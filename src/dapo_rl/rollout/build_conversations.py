"""Builds conversations with the environments that the settings name."""

from __future__ import annotations

from typing import Any

from dapo_rl.config import Config
from dapo_rl.data.chat import encode
from dapo_rl.envs.chat_format import ChatFormat, PlainText, chat_format
from dapo_rl.envs.messages import QUESTION
from dapo_rl.envs.pool import Environments
from dapo_rl.rewards.custom import DEFAULT_THRESHOLD
from dapo_rl.rollout.conversation import Conversations


def build_conversations(
    config: Config, pool: Environments, tokenizer: Any, *, context: int, max_new_tokens: int, rewards: bool
) -> Conversations:
    """`context` limits prompt and response together. `rewards`: whether the environment gives rewards."""
    if config.data.chat_template == "never":
        chat: ChatFormat = PlainText(tokenizer)
    else:
        chat = chat_format(tokenizer, config.env.tool_format, config.data.chat_template_kwargs)
    chat.parse([])  # an unknown format is a mistake in the settings
    if pool.tools:
        chat.prompt([QUESTION], pool.tools)  # so is a model that cannot be told of them
    threshold = config.reward.threshold
    return Conversations(
        pool,
        chat,
        config.env,
        max_new_tokens=max_new_tokens,
        context=context,
        rewards=rewards,
        encode=lambda text: encode(tokenizer, [text], special=False)[0],
        system=config.data.system_prompt,
        threshold=DEFAULT_THRESHOLD if threshold is None else threshold,
        wrong=config.reward.wrong,
    )


def longest_episode(config: Config, model: Any) -> int:
    """The tokens of an episode: as many as the settings allow, or as fit into the model's context."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens + config.env.max_observation_tokens
    limit = getattr(model.config, "max_position_embeddings", None)
    return min(longest, limit) if isinstance(limit, int) else longest
