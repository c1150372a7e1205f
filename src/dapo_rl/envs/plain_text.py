"""Conversations as plain text, for models without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_rl.data.chat import encode
from dapo_rl.envs.messages import no_place, plain_message
from dapo_rl.envs.protocol import Messages, Tools
from dapo_rl.envs.tool_syntax import Parsed, end_ids, tool_syntax


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

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools and not self._named:
            raise no_place(self._tokenizer)
        text = "\n\n".join(str(message.get("content") or "") for message in map(plain_message, messages))
        (ids,) = encode(self._tokenizer, [text], special=True)
        (bare,) = encode(self._tokenizer, [text], special=False)
        if ids[-1:] == [self._tokenizer.eos_token_id] and bare[-1:] != ids[-1:]:
            ids = ids[:-1]  # some tokenizers append EOS to every text, which would end the turn
        return list(map(int, ids))

    def suffix(self, before: Sequence[int], messages: Messages, tools: Tools = ()) -> list[int] | None:
        text = "".join(f"\n{message.get('content') or ''}" for message in map(plain_message, messages)) + "\n"
        (ids,) = encode(self._tokenizer, [text], special=False)
        return list(map(int, ids))

    def parse(self, turn_ids: Sequence[int], tools: Tools = ()) -> Parsed:
        if self._named:
            return self._parse(turn_ids, tools)
        end = next((n for n, token in enumerate(turn_ids) if token in self._ends), len(turn_ids))
        return Parsed(str(self._tokenizer.decode(list(turn_ids[:end]), clean_up_tokenization_spaces=False)))
