"""Converts a prompt to tokens: chat template, system prompt, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dapo_rl.base.quote import one_line
from dapo_rl.config import DataSettings
from dapo_rl.data.rows import BadRowError
from dapo_rl.errors import UserError

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    text: str
    """The text after the chat template was applied."""
    token_ids: tuple[int, ...]
    messages: Messages | None
    """The messages, including the system prompt, if the data has messages."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...


class PromptReader:
    """Reads prompts with a tokenizer and settings; repeated prompts are cached, unless there may be no end of them."""

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, key: str = "data", cached: bool = True) -> None:
        self._tokenizer = tokenizer
        self._mode = settings.chat_template
        self._system = settings.system_prompt
        self._key = key
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._seen: dict[Any, Reading] | None = {} if cached else None

    def read(self, prompt: str | Messages) -> Reading:
        if self._seen is None:
            return self._read(prompt)
        known_as = prompt if isinstance(prompt, str) else tuple(tuple(sorted(m.items())) for m in prompt)
        if known_as not in self._seen:
            self._seen[known_as] = self._read(prompt)
        return self._seen[known_as]

    def _with_system(self, messages: Messages) -> Messages:
        """Puts the system prompt of the settings first, unless the data has a system message."""
        if not self._system or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self._system}, *messages)

    def _read(self, prompt: str | Messages) -> Reading:
        is_text = isinstance(prompt, str)
        messages: Messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages = self._with_system(messages)
        if self.takes_template(is_text):
            text = self._apply_template(messages)
            token_ids = self._encode(text, add_special_tokens=False)  # the template adds its own
        else:
            text = "\n\n".join(message["content"] for message in messages)
            token_ids = self._encode_plain(text)
        if not token_ids:
            raise BadRowError("the prompt has no tokens")
        return Reading(text, tuple(token_ids), None if is_text else messages)

    def takes_template(self, is_text: bool) -> bool:
        """Whether a prompt, given as text or as messages, goes through the chat template."""
        if self._mode == "never":
            return False
        if self._mode == "auto" and is_text:
            return bool(self._system) and self._has_template
        if not self._has_template:
            what = "data.chat_template=always" if self._mode == "always" else "the prompts are chat messages"
            raise UserError(
                f"{self._key}: {what}, but the tokenizer has no chat template; "
                "data.chat_template=never joins messages as plain text"
            )
        return True

    def _apply_template(self, messages: Messages) -> str:
        # A final message by the assistant is the beginning of its response, as in TRL.
        begun = messages[-1]["role"] == "assistant"
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=not begun,
                    continue_final_message=begun,
                )
            )
        except Exception as error:  # a template is code of the model, and may reject roles or their order
            raise BadRowError(f"the chat template rejects it: {one_line(error)}") from None

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [int(token) for token in ids]

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._encode(text, add_special_tokens=True)
        eos = self._tokenizer.eos_token_id
        if eos is None or ids[-1:] != [eos]:
            return ids
        # Some tokenizers append EOS to every text, which would end the response; an EOS in the text itself stays.
        return ids if self._encode(text, add_special_tokens=False)[-1:] == [eos] else ids[:-1]
