"""Converts a prompt to tokens: chat template, system prompt, special tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class _Written:
    """A prompt as the model gets it, before it is tokenized."""

    text: str
    messages: Messages | None
    special: bool
    """Whether the tokenizer adds its special tokens."""


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
        self._arguments = settings.chat_template_kwargs
        if self._has_template:
            _check_arguments(self._arguments, tokenizer.chat_template)
        self._cache: dict[Any, Reading] | None = {} if cached else None

    def read(self, prompt: str | Messages) -> Reading:
        key = _cache_key(prompt)
        if self._cache is not None and key in self._cache:
            return self._cache[key]
        (reading,) = self._read([prompt])
        if isinstance(reading, BadRowError):
            raise reading
        if self._cache is not None:
            self._cache[key] = reading
        return reading

    def read_ahead(self, prompts: Iterable[str | Messages]) -> None:
        """Fills the cache: rendering and tokenizing many texts per call takes a third of the time. Prompts that cannot
        be read are skipped; `read` says why."""
        assert self._cache is not None
        new = list({key: prompt for prompt in prompts if (key := _cache_key(prompt)) not in self._cache}.items())
        for start in range(0, len(new), AT_A_TIME):
            part = new[start : start + AT_A_TIME]
            for (key, _), reading in zip(part, self._read([prompt for _, prompt in part]), strict=True):
                if isinstance(reading, Reading):
                    self._cache[key] = reading

    def _read(self, prompts: Sequence[str | Messages]) -> list[Reading | BadRowError]:
        """Each prompt, or why it cannot be read."""
        written = self._written(prompts)
        good = [each for each in written if isinstance(each, _Written)]
        tokens = {
            special: iter(self._encode([each.text for each in good if each.special is special], special))
            for special in {each.special for each in good}
        }
        return [
            self._reading(each, next(tokens[each.special])) if isinstance(each, _Written) else each for each in written
        ]

    def _with_system(self, messages: Messages) -> Messages:
        """Puts the system prompt of the settings first, unless the data has a system message."""
        if not self._system or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self._system}, *messages)

    def _written(self, prompts: Sequence[str | Messages]) -> list[_Written | BadRowError]:
        """The text of each prompt, or why it has none."""
        conversations: list[Messages] = [
            self._with_system(({"role": "user", "content": each},) if isinstance(each, str) else each)
            for each in prompts
        ]
        are_texts = [isinstance(each, str) for each in prompts]
        takes = [self.takes_template(is_text) for is_text in are_texts]
        templated = self._templated([each for each, takes_it in zip(conversations, takes, strict=True) if takes_it])
        written: list[_Written | BadRowError] = []
        for messages, is_text, takes_it in zip(conversations, are_texts, takes, strict=True):
            # The template adds special tokens of its own.
            text = next(templated) if takes_it else "\n\n".join(message["content"] for message in messages)
            kept = None if is_text else messages
            written.append(_Written(text, kept, special=not takes_it) if isinstance(text, str) else text)
        return written

    def _reading(self, written: _Written, ids: Sequence[int]) -> Reading | BadRowError:
        token_ids = tuple(map(int, ids))
        if written.special and self._ends_too_early(written.text, token_ids):
            token_ids = token_ids[:-1]
        if not token_ids:
            return BadRowError("the prompt has no tokens")
        return Reading(written.text, token_ids, written.messages)

    def takes_template(self, is_text: bool) -> bool:
        """Whether a prompt, given as text or as messages, goes through the chat template."""
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

    def _encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        """The tokens of each text, with or without special ones. Uses one thread: the library's thread pool would
        still exist when verifiers are forked."""
        name = "TOKENIZERS_PARALLELISM"
        users_own = name in os.environ
        os.environ.setdefault(name, "false")
        try:
            ids: list[Sequence[int]] = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        finally:
            if not users_own:
                del os.environ[name]
        return ids

    def _ends_too_early(self, text: str, token_ids: Sequence[int]) -> bool:
        """Some tokenizers append EOS to every text, which would end the response; an EOS in the text itself stays."""
        eos = self._tokenizer.eos_token_id
        if eos is None or token_ids[-1:] != (eos,):
            return False
        (plain,) = self._encode([text], special=False)
        return list(plain[-1:]) != [eos]


def _check_arguments(arguments: Mapping[str, Any], template: Any) -> None:
    """Raises UserError for an argument that the template does not have: it would be ignored without a word."""
    known = set(re.findall(r"[A-Za-z_]\w*", str(template)))
    for name in arguments:
        if name not in known:
            hint = did_you_mean(nearest(name, known, cutoff=0.7), "leave it out")
            raise UserError(f"{ARGUMENTS}.{name}: the tokenizer's chat template has no such argument{hint}")


def _cache_key(prompt: str | Messages) -> Any:
    return prompt if isinstance(prompt, str) else tuple(tuple(sorted(message.items())) for message in prompt)
