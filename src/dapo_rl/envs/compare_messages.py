"""Whether what an agent sends continues the conversation so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dapo_rl.envs.protocol import Message


def same(mine: Any, other: Any) -> bool:
    """Whether two values are the same as JSON."""
    return json.dumps(mine, sort_keys=True, default=list) == json.dumps(other, sort_keys=True, default=list)


def same_messages(mine: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether two conversations say the same, in whichever way an agent writes tool calls and empty contents."""
    return len(mine) == len(others) and all(
        same(_normal(message), _normal(other)) for message, other in zip(mine, others, strict=True)
    )


def _normal(message: Message) -> dict[str, Any]:
    normal: dict[str, Any] = {"role": message.get("role"), "content": _text(message.get("content"))}
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if calls:
        normal["tool_calls"] = [(call.get("name"), _arguments(call.get("arguments"))) for call in calls]
    return normal


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content).strip()


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
