"""The opening of an episode whose environment describes its task itself."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.envs.protocol import Message, Opening, ToolSchema
from dapo_rl.types import Prompt


def opening(prompt: Prompt, text: str, tools: Sequence[ToolSchema] = ()) -> Opening:
    """The prompt's conversation; the text becomes a paragraph of its last message if that is the user's."""
    before: tuple[Message, ...] = tuple(prompt.messages or ())
    if prompt.messages is None and prompt.text:
        before = ({"role": "user", "content": prompt.text},)
    if not text:
        return Opening(before, tuple(tools))
    if before and before[-1].get("role") == "user":
        last = before[-1]
        joined = f"{last['content']}\n\n{text}" if last["content"] else text
        return Opening((*before[:-1], {**last, "content": joined}), tuple(tools))
    return Opening((*before, {"role": "user", "content": text}), tuple(tools))
