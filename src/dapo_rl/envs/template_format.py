"""Conversations by a tokenizer's chat template, which is rendered in a limited process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.data.chat import encode
from dapo_rl.data.template import render
from dapo_rl.envs.messages import PROBE, QUESTION, ToolCheck, plain_message, rejected, tool_name
from dapo_rl.envs.protocol import Message, Messages, Tools, ToolSchema, tool_call
from dapo_rl.envs.tool_syntax import THINK, THINK_END, Parsed, Syntax, end_ids, syntax_of, tool_syntax

DATE = "26 Jul 2024"
"""For templates that write the date: theirs if they cannot ask for it. A run must not change at midnight."""
CACHED = 4096
"""Rendered texts that are kept: the samples of a group begin with the same messages."""
ANSWER, THOUGHT = "Answer", f"{THINK}\nBecause\n{THINK_END}\n\n"


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
        self._tool_check = ToolCheck(tokenizer, self._ids, self.parse)

    @property
    def supports_tools(self) -> bool:
        return self._named or self._tool_check.has_place

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools and not self._named:
            self._tool_check(tools)
        return self._ids(messages, tools)

    def suffix(self, before: Sequence[int], messages: Messages, tools: Tools = ()) -> list[int] | None:
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

    def parse(self, turn_ids: Sequence[int], tools: Tools = ()) -> Parsed:
        return self._parse(turn_ids, tools)

    def text(self, messages: Messages, tools: Tools, generation: bool) -> str:
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
        """Whether the policy has seen or written thoughts that the template may drop."""
        if "think" not in self._template:
            return False
        added = self._tokenizer.get_added_vocab()
        if THINK in added and THINK_END in added:
            return added[THINK] in before or added[THINK_END] in before
        text = self._tokenizer.decode(list(before))
        return THINK in text or THINK_END in text

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
        names = [str(message.get("name") or tool_name(PROBE)) for message in results]
        ids = [str(message.get("tool_call_id") or f"call{n:05}") for n, message in enumerate(results)]
        calls = [tool_call(number, name, {}) for number, name in zip(ids, names, strict=True)]
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

    def _ids(self, messages: Messages, tools: Tools) -> list[int]:
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


def _frozen(items: Sequence[Mapping[str, Any]]) -> str:
    """Messages or tools as a key of the cache."""
    return json.dumps([plain_message(item) if "role" in item else dict(item) for item in items], default=_jsonable)


def _jsonable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _shows(text: str, messages: Messages) -> bool:
    """Whether the contents of all messages are in the text: some templates skip results of tools without calls."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and (content := content.strip()):
            as_json = (json.dumps(content, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
            if content not in text and not any(written in text for written in as_json):
                return False
    return True
