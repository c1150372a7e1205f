"""Chat messages as tokens, for episodes of several turns: what the policy sampled is never tokenized again.

A conversation begins with `prompt`; what the world answers to a turn is appended as `suffix`. Where the template
rewrites the turns before, as some do with earlier thoughts, there is no suffix, and the conversation is rendered anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from dapo_rl.envs.plain_text import PlainText
from dapo_rl.envs.protocol import Messages, Tools
from dapo_rl.envs.renderer_format import renderer_format
from dapo_rl.envs.template_format import TemplateFormat
from dapo_rl.envs.tool_syntax import Parsed

__all__ = ["ChatFormat", "Parsed", "PlainText", "chat_format"]


class ChatFormat(Protocol):
    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """All tokens before the policy's turn, with the generation prompt. A last message of the assistant is the
        beginning of the turn."""
        ...

    def suffix(self, before: Sequence[int], messages: Messages, tools: Tools = ()) -> list[int] | None:
        """Tokens to append to `before`, which ends with the policy's turn, with or without its end-of-turn token: for
        new messages, and the next generation prompt. None if the template rewrites history here, so that the
        conversation must be rendered anew."""
        ...

    def parse(self, turn_ids: Sequence[int], tools: Tools = ()) -> Parsed: ...

    @property
    def supports_tools(self) -> bool:
        """Whether the policy can be told of tools."""
        ...


def chat_format(
    tokenizer: Any, tool_format: str = "auto", template_kwargs: Mapping[str, Any] = MappingProxyType({})
) -> ChatFormat:
    """The format of a tokenizer: that of `renderers` for the families it knows, otherwise its chat template, otherwise
    plain text. `template_kwargs`: arguments of the chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return PlainText(tokenizer, tool_format)
    ours = TemplateFormat(tokenizer, tool_format, template_kwargs)
    return renderer_format(tokenizer, tool_format, template_kwargs, ours) or ours
