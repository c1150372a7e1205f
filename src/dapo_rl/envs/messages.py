"""Messages and tools as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dapo_rl.base.quote import one_line, shown
from dapo_rl.envs.protocol import Message, Messages, Tools, ToolSchema, tool_call, tool_schema
from dapo_rl.envs.tool_syntax import Parsed
from dapo_rl.errors import UserError

QUESTION: Message = MappingProxyType({"role": "user", "content": "Question"})
PROBE = tool_schema(
    "look_up",
    "Looks up a word.",
    {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}, "required": ["word"]},
)


class ToolCheck:
    """Raises UserError for tools that a format cannot tell the policy of, or that cannot be called in it."""

    def __init__(
        self,
        tokenizer: Any,
        render_ids: Callable[[Messages, Tools], list[int]],
        parse: Callable[[Sequence[int], Tools], Parsed],
    ) -> None:
        self._tokenizer, self._render_ids, self._parse = tokenizer, render_ids, parse
        self._fine: set[str] = set()

    @cached_property
    def has_place(self) -> bool:
        try:
            return bool(self._render_ids([QUESTION], [PROBE]) != self._render_ids([QUESTION], ()))
        except UserError:
            return False

    @cached_property
    def _writes_calls(self) -> bool:
        """Whether the template writes calls in a form that is read back."""
        return self._is_read_back(tool_name(PROBE))

    def __call__(self, tools: Tools) -> None:
        names = {tool_name(tool) for tool in tools} - self._fine
        if not names:
            return
        if not self.has_place:
            raise no_place(self._tokenizer)
        for name in sorted(names):
            if self._writes_calls and not self._is_read_back(name):
                raise UserError(
                    f"env.tools: the chat template of {model_name(self._tokenizer)} cannot express the tool name "
                    f"{shown(name)}; use letters, digits and _"
                )
        self._fine |= names

    def _is_read_back(self, name: str) -> bool:
        turn = {"role": "assistant", "content": "", "tool_calls": [tool_call("call00000", name, {})]}
        result = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": ""}
        try:
            before = self._render_ids([QUESTION], [PROBE])
            after = self._render_ids([QUESTION, turn, result], [PROBE])
        except UserError:
            return False
        start = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
        called = self._parse(after[start:], [PROBE]).tool_calls
        return [(call.name, call.error) for call in called] == [(name, "")]


def no_place(tokenizer: Any) -> UserError:
    has_none = not getattr(tokenizer, "chat_template", None)
    what = "{} has no chat template" if has_none else "the chat template of {} has no place for tools"
    return UserError(
        f"env.tools: {what.format(model_name(tokenizer))}; take a model that is trained "
        "to call tools, or set env.tool_format if it knows a format and the prompts describe the tools"
    )


def rejected(tokenizer: Any, error: Exception) -> UserError:
    return UserError(f"env: the chat template of {model_name(tokenizer)} rejects the messages: {one_line(error)}")


def model_name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or "this model")


def plain_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: its content a text, the arguments of its tool calls objects."""
    content = message.get("content")
    result = dict(message)
    if isinstance(content, Sequence) and not isinstance(content, str):  # OpenAI's list of parts
        parts = [part if isinstance(part, str) else part.get("text") for part in content]
        if all(isinstance(part, str) for part in parts):
            result["content"] = "".join(parts)
    elif content is None and not message.get("tool_calls"):
        result["content"] = ""
    if message.get("tool_calls"):
        result["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return result


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # the template then writes it as it is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def tool_name(tool: ToolSchema) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def with_system(messages: Messages, system: str | None) -> tuple[Message, ...]:
    """With the system prompt first, unless there is a system message."""
    if not system or not messages or messages[0].get("role") == "system":
        return tuple(messages)
    return ({"role": "system", "content": system}, *messages)
