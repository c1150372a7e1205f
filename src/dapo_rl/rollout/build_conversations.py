"""Builds conversations with the environments that the settings name."""

from __future__ import annotations

from typing import Any

from dapo_rl.config import Config
from dapo_rl.data.chat import encode
from dapo_rl.data.prompts import Fits, always_fits
from dapo_rl.envs.chat_format import ChatFormat, PlainText, chat_format
from dapo_rl.envs.messages import QUESTION, with_system
from dapo_rl.envs.opening import opening
from dapo_rl.envs.pool import Environments
from dapo_rl.models.tokenizer import CHAT_TEMPLATE
from dapo_rl.rewards.custom import threshold_of
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.types import Prompt


def build_conversations(
    config: Config,
    pool: Environments,
    tokenizer: Any,
    *,
    context: int,
    max_new_tokens: int,
    rewards: bool,
    vocabulary: int,
) -> Conversations:
    """`context` limits prompt and response together. `rewards`: whether the environment gives rewards. `vocabulary`:
    how many tokens the model has."""
    chat = _chat(config, pool, tokenizer)
    return Conversations(
        pool,
        chat,
        config.env,
        max_new_tokens=max_new_tokens,
        context=context,
        rewards=rewards,
        encode=lambda text: encode(tokenizer, [text], special=False)[0],
        system=config.data.system_prompt,
        threshold=threshold_of(config.reward),
        wrong=config.reward.wrong,
        vocabulary=vocabulary,
    )


def prompt_fits(config: Config, pool: Environments | None, tokenizer: Any) -> Fits:
    """Whether a prompt with its tools and system prompt has at most `data.max_prompt_tokens`. What environments add
    when an episode begins, and what agents ask, is not known before."""
    system, most = config.data.system_prompt, config.data.max_prompt_tokens
    if pool is None or pool.takes_tokens or not (pool.tools or system):
        return always_fits
    tools, chat = pool.tools, _chat(config, pool, tokenizer)
    added = len(chat.prompt(with_system([QUESTION], system), tools))

    def fits(prompt: Prompt) -> bool:
        messages = with_system(opening(prompt, "").messages, system)
        if len(prompt.token_ids) + added * len(messages) <= most:  # need not be rendered
            return True
        return not messages or len(chat.prompt(messages, tools)) <= most

    return fits


def _chat(config: Config, pool: Environments, tokenizer: Any) -> ChatFormat:
    if config.data.chat_template == "never":
        chat: ChatFormat = PlainText(tokenizer)
    else:
        chat = chat_format(tokenizer, _tool_format(config, tokenizer), config.data.chat_template_kwargs)
    chat.parse([])  # an unknown format is a mistake in the settings
    if pool.tools:
        chat.prompt([QUESTION], pool.tools)  # so is a model that cannot be told of them
    return chat


def untold_tools(config: Config, pool: Environments | None, tokenizer: Any) -> str | None:
    """A note if the policy is not told of its tools, although no setting says so."""
    if pool is None or not pool.tools or config.data.chat_template == "never":
        return None
    if (chosen := _tool_format(config, tokenizer)) == config.env.tool_format:
        return None
    return f"env.tool_format={chosen}: the embedded model's chat template does not show tools, and it knows no format"


def _tool_format(config: Config, tokenizer: Any) -> str:
    """`env.tool_format`; for the embedded model, which can be told of no tools, `auto` is a format to try them with."""
    is_embedded = tokenizer.chat_template == CHAT_TEMPLATE
    return "hermes" if is_embedded and config.env.tool_format == "auto" else config.env.tool_format


def longest_episode(config: Config, model: Any) -> int:
    """The tokens of an episode: as many as the settings allow, or as fit into the model's context."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens + config.env.max_observation_tokens
    limit = getattr(model.config, "max_position_embeddings", None)
    return min(longest, limit) if isinstance(limit, int) else longest
