"""Chat messages as tokens, for episodes of several turns: what the policy sampled is never tokenized again.

A conversation begins with `prompt`; what the world answers to a turn is appended as `suffix`. Where the template
rewrites the turns before, as some do with earlier thoughts, there is no suffix, and the conversation is rendered anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from dapo_rl.base.quote import one_line, shown
from dapo_rl.data.chat import encode
from dapo_rl.data.template import render
from dapo_rl.envs.protocol import Message, ToolSchema
from dapo_rl.envs.tool_syntax import THINK, THINK_END, Parsed, Syntax, end_ids, syntax_of, tool_syntax
from dapo_rl.errors import UserError

__all__ = ["ChatFormat", "Parsed", "PlainText", "TemplateFormat", "ToolCheck", "chat_format", "model_name", "plain"]

DATE = "26 Jul 2024"
"""For templates that write the date: theirs if they cannot ask for it. A run must not change at midnight."""
CACHED = 4096
"""Rendered texts that are kept: the samples of a group begin with the same messages."""
QUESTION: Message = MappingProxyType({"role": "user", "content": "Question"})
ANSWER, THOUGHT = "Answer", f"{THINK}\nBecause\n{THINK_END}\n\n"
PROBE: ToolSchema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


class ChatFormat(Protocol):
    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """All tokens before the policy's turn, with the generation prompt. A last message of the assistant is the
        beginning of the turn."""
        ...

    def suffix(
        self, before: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> list[int] | None:
        """Tokens to append to `before`, which ends with the policy's turn, with or without its end-of-turn token: for
        new messages, and the next generation prompt. None if the template rewrites history here, so that the
        conversation must be rendered anew."""
        ...

    def parse(self, turn_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Parsed: ...

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
    from dapo_rl.envs.renderer_format import renderer_format

    return renderer_format(tokenizer, tool_format, template_kwargs, ours) or ours


class PlainText:
    """The contents of the messages, for tokenizers without a chat template."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._named = tool_format != "auto"
        self._parse = tool_syntax(tool_format if self._named else "hermes", tokenizer)
        self._ends = end_ids(tokenizer)

    @property
    def supports_tools(self) -> bool:
        return self._named

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        if tools and not self._named:
            raise no_place(self._tokenizer)
        text = "\n\n".join(str(message.get("content") or "") for message in map(plain, messages))
        (ids,) = encode(self._tokenizer, [text], special=True)
        (bare,) = encode(self._tokenizer, [text], special=False)
        if ids[-1:] == [self._tokenizer.eos_token_id] and bare[-1:] != ids[-1:]:
            ids = ids[:-1]  # some tokenizers append EOS to every text, which would end the turn
        return list(map(int, ids))

    def suffix(
        self, before: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> list[int] | None:
        text = "".join(f"\n{message.get('content') or ''}" for message in map(plain, messages)) + "\n"
        (ids,) = encode(self._tokenizer, [text], special=False)
        return list(map(int, ids))

    def parse(self, turn_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Parsed:
        if self._named:
            return self._parse(turn_ids, tools)
        end = next((n for n, token in enumerate(turn_ids) if token in self._ends), len(turn_ids))
        return Parsed(str(self._tokenizer.decode(list(turn_ids[:end]), clean_up_tokenization_spaces=False)))


class TemplateFormat:
    """A tokenizer's chat template. The suffix is cut out of the text of a small conversation that goes on with the
    same messages."""

    def __init__(self, tokenizer: Any, tool_format: str, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = str(tokenizer.chat_template)
        self._ends = end_ids(tokenizer)
        dated = {"date_string": DATE} if "date_string" in self._template else {}
        self._kwargs = {**dated, **template_kwargs}
        self._named = tool_format != "auto"
        self._syntax_name = tool_format if self._named else syntax_of(self._template)
        self._text = lru_cache(CACHED)(self._rendered)
        self._rests = lru_cache(CACHED)(self._rest)
        self._tool_check = ToolCheck(tokenizer, lambda messages, tools: self._ids(messages, tools), self)

    @property
    def supports_tools(self) -> bool:
        return self._named or self._tool_check.has_place

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        if tools and not self._named:
            self._tool_check(tools)
        return self._ids(messages, tools)

    def suffix(
        self, before: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> list[int] | None:
        if not messages or any(message.get("role") == "assistant" for message in messages):
            return None
        rest = self._rests(_frozen(messages), _frozen(tools), self._thought(before))
        if rest is None:
            return None
        ids = self._encode(rest)
        if before and before[-1] in self._ends:
            closing = len(self._encode(self._closing))
            end = next((n for n, token in enumerate(ids[: max(closing, 1)]) if token in self._ends), -1)
            ids = ids[end + 1 :]
        return ids

    def parse(self, turn_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Parsed:
        return self._parse(turn_ids, tools)

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], generation: bool) -> str:
        """The template's text; raises ValueError if it rejects the messages."""
        text = self._text(_frozen(messages), _frozen(tools), generation)
        if isinstance(text, Exception):
            raise ValueError(one_line(text))
        return text

    @cached_property
    def _parse(self) -> Syntax:
        thinks = THINK_END in self._template or THINK_END in self._tokenizer.get_added_vocab()
        return tool_syntax(self._syntax_name, self._tokenizer, thinks=thinks, opened=thinks and self._opened)

    @cached_property
    def _opened(self) -> bool:
        """Whether the generation prompt begins thoughts."""
        return self.text([QUESTION], (), True).rstrip().endswith(THINK)

    @cached_property
    def _closing(self) -> str:
        """What follows the content of a turn."""
        for content in (THOUGHT + ANSWER, ANSWER):
            turn = {"role": "assistant", "content": content}
            try:
                text = self.text([QUESTION, turn], (), False)
            except ValueError:
                continue
            if text.startswith(begun := self.text([QUESTION], (), True) + self._as_sampled(content)):
                return text[len(begun) :]
        return ""

    def _as_sampled(self, content: str) -> str:
        """A turn's content without what the generation prompt has of it."""
        return content.removeprefix(THINK).lstrip("\n") if self._opened and content.startswith(THINK) else content

    def _thought(self, before: Sequence[int]) -> bool:
        """Whether there are thoughts in what the policy has seen and written: the template may drop them."""
        marker = self._tokenizer.get_added_vocab().get(THINK_END)
        return marker in before if marker is not None else THINK_END in self._tokenizer.decode(list(before))

    def _rest(self, messages: str, tools: str, thought: bool) -> str | None:
        """The text after the content of a turn that goes on with these messages."""
        new, known = json.loads(messages), json.loads(tools)
        for content in (THOUGHT + ANSWER, ANSWER) if thought else (ANSWER,):
            try:
                begun = self.text([QUESTION], known, True) + self._as_sampled(content)
                text = self.text([QUESTION, {"role": "assistant", "content": content}, *new], known, True)
            except ValueError:
                return self._rest_of_calls(new, known)
            if not text.startswith(begun):
                return None
            rest = text[len(begun) :]
        return rest if _shows(rest, new) else self._rest_of_calls(new, known)

    def _rest_of_calls(self, new: list[Message], tools: list[ToolSchema]) -> str | None:
        """As `_rest`, for templates in which the results of tools must follow calls."""
        results = [message for message in new if message.get("role") == "tool"]
        names = [str(message.get("name") or _name(PROBE)) for message in results]
        ids = [str(message.get("tool_call_id") or f"call{n:05}") for n, message in enumerate(results)]
        calls = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": {}}}
            for number, name in zip(ids, names, strict=True)
        ]
        turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            begun = self.text(turns, tools, False)
            text = self.text([*turns, *new], tools, True)
        except ValueError:
            return None
        rest = text[len(begun) :]
        if not calls or not text.startswith(begun) or not begun.endswith(self._closing) or not _shows(rest, new):
            return None
        return self._closing + rest

    def _ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        try:
            return self._encode(self.text(messages, tools, True))
        except ValueError as error:
            raise rejected(self._tokenizer, error) from None

    def _rendered(self, messages: str, tools: str, generation: bool) -> str | Exception:
        conversation = json.loads(messages)
        begun = generation and conversation[-1]["role"] == "assistant"
        options: dict[str, Any] = {"add_generation_prompt": generation and not begun, "continue_final_message": begun}
        if known := json.loads(tools):
            options["tools"] = known
        (text,) = render(self._tokenizer, [(conversation, {**options, **self._kwargs})])
        return text

    def _encode(self, text: str) -> list[int]:
        (ids,) = encode(self._tokenizer, [text], special=False)  # the template writes its special tokens itself
        return list(map(int, ids))


class ToolCheck:
    """Raises UserError for tools that a format cannot tell the policy of, or that cannot be called in it."""

    def __init__(self, tokenizer: Any, render_ids: Any, format: ChatFormat) -> None:
        self._tokenizer, self._render_ids, self._format = tokenizer, render_ids, format
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
        return self._is_read_back(_name(PROBE))

    def __call__(self, tools: Sequence[ToolSchema]) -> None:
        names = {_name(tool) for tool in tools} - self._fine
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
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": ""}
        try:
            before = self._render_ids([QUESTION], [PROBE])
            after = self._render_ids([QUESTION, turn, result], [PROBE])
        except UserError:
            return False
        start = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
        called = self._format.parse(after[start:], [PROBE]).tool_calls
        return [call.name for call in called] == [name]


def no_place(tokenizer: Any) -> UserError:
    return UserError(
        f"env.tools: the chat template of {model_name(tokenizer)} has no place for tools; take a model that is trained "
        "to call tools, or set env.tool_format if it knows a format and the prompts describe the tools"
    )


def rejected(tokenizer: Any, error: Exception) -> UserError:
    return UserError(f"env: the chat template of {model_name(tokenizer)} rejects the messages: {one_line(error)}")


def model_name(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or "this model")


def plain(message: Message) -> dict[str, Any]:
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
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            pass  # the template writes it as it is
    return {**call, "function": function}


def _frozen(items: Sequence[Mapping[str, Any]]) -> str:
    """Messages or tools as a key of the cache."""
    return json.dumps([plain(item) if "role" in item else dict(item) for item in items], default=_jsonable)


def _jsonable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _shows(text: str, messages: Sequence[Message]) -> bool:
    """Whether the contents of all messages are in the text: some templates skip results of tools without calls."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and (content := content.strip()):
            as_json = (json.dumps(content, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
            if content not in text and not any(written in text for written in as_json):
                return False
    return True


def _name(tool: ToolSchema) -> str:
    return str((tool.get("function") or tool).get("name", ""))
