"""The opening of an episode whose environment describes its task itself."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.envs.protocol import Message, Opening, ToolSchema
from dapo_rl.types import Prompt


def opening(prompt: Prompt, text: str, tools: Sequence[ToolSchema] = ()) -> Opening:
    """The prompt's conversation; the text becomes a paragraph of its last message if that is the user's."""
    before = prompt.conversation if prompt.messages or prompt.text else ()
    return Opening(with_text(before, text, "\n\n"), tuple(tools))


def with_text(messages: Sequence[Message], text: str, between: str = "") -> tuple[Message, ...]:
    """The messages with a text appended to the last one, if it is the user's."""
    if not text:
        return tuple(messages)
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
        before = messages[-1]["content"]
        return (*messages[:-1], {**messages[-1], "content": f"{before}{between if before else ''}{text}"})
    return (*messages, {"role": "user", "content": text})
