"""Converts a prompt to tokens: chat template, system prompt, special tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import DataSettings
from dapo_rl.data.rows import BadRowError
from dapo_rl.data.template import render
from dapo_rl.errors import UserError

ARGUMENTS = "data.chat_template_kwargs"
AT_A_TIME = 1000
"""Texts that the template and the tokenizer get in a call."""
Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    text: str
    """The text after the chat template was applied."""
    token_ids: tuple[int, ...]
    messages: Messages | None
    """The messages, including the system prompt, if the data has messages."""
    question: str = ""
    """Plain text that went through the chat template."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...


class PromptReader:
    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, key: str = "data") -> None:
        self._tokenizer = tokenizer
        self._mode = settings.chat_template
        self._system = settings.system_prompt
        self._key = key
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._arguments = settings.chat_template_kwargs
        if self._has_template:
            _check_arguments(self._arguments, tokenizer.chat_template)

    def read(self, prompts: Sequence[str | Messages]) -> list[Reading | BadRowError]:
        """Each prompt, or why it cannot be read. Equal prompts are read once, and many texts are rendered and tokenized
        per call, which takes a third of the time."""
        keys = [_key(prompt) for prompt in prompts]
        different = list(dict(zip(keys, prompts, strict=True)).items())
        readings: dict[Any, Reading | BadRowError] = {}
        for start in range(0, len(different), AT_A_TIME):
            part = dict(different[start : start + AT_A_TIME])
            readings |= zip(part, self._read(list(part.values())), strict=True)
        return [readings[key] for key in keys]

    def _read(self, prompts: Sequence[str | Messages]) -> list[Reading | BadRowError]:
        conversations: list[Messages] = [
            self._with_system(({"role": "user", "content": each},) if isinstance(each, str) else each)
            for each in prompts
        ]
        takes = [self.takes_template(isinstance(each, str)) for each in prompts]
        templated = self._templated([each for each, takes_it in zip(conversations, takes, strict=True) if takes_it])
        texts = [
            next(templated) if takes_it else "\n\n".join(message["content"] for message in messages)
            for messages, takes_it in zip(conversations, takes, strict=True)
        ]
        ours: dict[bool, list[str]] = {True: [], False: []}
        for text, takes_it in zip(texts, takes, strict=True):
            if isinstance(text, str):
                ours[takes_it].append(text)
        # The template adds its special tokens itself.
        tokens = {takes_it: iter(encode(self._tokenizer, own, special=not takes_it)) for takes_it, own in ours.items()}
        readings: list[Reading | BadRowError] = []
        for prompt, messages, takes_it, text in zip(prompts, conversations, takes, texts, strict=True):
            if isinstance(text, BadRowError):
                readings.append(text)
                continue
            ids = tuple(map(int, next(tokens[takes_it])))
            if not takes_it and self._ends_too_early(text, ids):
                ids = ids[:-1]
            kept = None if isinstance(prompt, str) else messages
            question = prompt if takes_it and isinstance(prompt, str) else ""
            readings.append(Reading(text, ids, kept, question) if ids else BadRowError("the prompt has no tokens"))
        return readings

    def _with_system(self, messages: Messages) -> Messages:
        """Puts the system prompt of the settings first, unless the data has a system message."""
        if not self._system or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self._system}, *messages)

    def takes_template(self, is_text: bool) -> bool:
        if self._mode == "never":
            return False
        if self._mode == "auto" and is_text:
            if self._arguments and not self._system:
                raise UserError(
                    f"{self._key}: {ARGUMENTS} has no effect on prompts of plain text; set data.chat_template=always, "
                    "or leave it out"
                )
            return bool(self._system) and self._has_template
        if not self._has_template:
            what = "data.chat_template=always" if self._mode == "always" else "the prompts are chat messages"
            raise UserError(
                f"{self._key}: {what}, but the tokenizer has no chat template; "
                "data.chat_template=never joins messages as plain text"
            )
        return True

    def _templated(self, conversations: Sequence[Messages]) -> Iterator[str | BadRowError]:
        # A final message by the assistant is the beginning of its response, as in TRL.
        begun = [messages[-1]["role"] == "assistant" for messages in conversations]
        options = [
            {"add_generation_prompt": not last, "continue_final_message": last, **self._arguments} for last in begun
        ]
        for text in render(self._tokenizer, list(zip(conversations, options, strict=True))):
            # A template is code of the model, and may reject roles or their order.
            yield text if isinstance(text, str) else BadRowError(f"the chat template rejects it: {one_line(text)}")

    def _ends_too_early(self, text: str, token_ids: Sequence[int]) -> bool:
        """Some tokenizers append EOS to every text, which would end the response; an EOS in the text itself stays."""
        eos = self._tokenizer.eos_token_id
        if eos is None or token_ids[-1:] != (eos,):
            return False
        (plain,) = encode(self._tokenizer, [text], special=False)
        return list(plain[-1:]) != [eos]


def encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[Sequence[int]]:
    if not texts:
        return []
    with one_thread():
        ids: list[Sequence[int]] = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps the tokenizer to one thread: the library's thread pool would still exist when verifiers are forked."""
    name = "TOKENIZERS_PARALLELISM"
    users_own = name in os.environ
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if not users_own:
            os.environ.pop(name, None)


def _check_arguments(arguments: Mapping[str, Any], template: Any) -> None:
    """Raises UserError for an argument that the template does not have: it would be ignored without a word."""
    known = set(re.findall(r"[A-Za-z_]\w*", str(template)))
    for name in arguments:
        if name not in known:
            hint = did_you_mean(nearest(name, known, cutoff=0.7), "leave it out")
            raise UserError(f"{ARGUMENTS}.{name}: the tokenizer's chat template has no such argument{hint}")


def _key(prompt: str | Messages) -> Any:
    return prompt if isinstance(prompt, str) else tuple(tuple(sorted(message.items())) for message in prompt)
