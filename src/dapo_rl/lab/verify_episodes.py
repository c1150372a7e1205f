"""Episodes of a dry run as conversations: turns, tool calls with arguments, results, rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dapo_rl.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class DryMessage:
    role: str
    text: str
    calls: tuple[str, ...] = ()
    """Tool calls, such as `search(query="dapo")`."""
    name: str = ""
    """Of a tool, for its result."""
    turn: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    reward: float = 0.0


def conversation_of(group: Group, index: int) -> tuple[DryMessage, ...]:
    """The messages of an episode; empty without an environment."""
    parts = [*(fork for fork in group.forks if fork.index == index), group.samples[index]]
    messages, number = list[DryMessage](), 0
    for part in parts:
        for message in _messages(part, number):
            messages.append(message)
            number = message.turn or number
    return tuple(messages)


def _messages(trajectory: Trajectory, before: int) -> Iterator[DryMessage]:
    turns = iter([turn for turn in trajectory.turns if turn.author == "policy"])
    number = before
    for message in trajectory.messages:
        role, content = str(message.get("role", "")), message.get("content")
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        if role != "assistant":
            yield DryMessage(role, text, name=str(message.get("name", "")))
            continue
        number += 1
        turn = next(turns, None)
        figures = (0, 0.0, 0.0) if turn is None else (turn.end - turn.start, turn.seconds, turn.reward)
        calls = tuple(_call(call) for call in message.get("tool_calls") or ())
        yield DryMessage(role, text, calls, "", number, *figures)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, Mapping):
        return f"{function.get('name', '')}({arguments})"
    words = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name', '')}({', '.join(words)})"
