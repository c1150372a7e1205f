"""What a teacher reads in place of the prompts of its pupil (`teacher.prompt`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_rl.base.placeholders import filled
from dapo_rl.config import DataSettings
from dapo_rl.data.chat import Messages, PromptReader
from dapo_rl.data.rows import BadRowError
from dapo_rl.errors import UserError
from dapo_rl.types import IntArray, Prompt

KEY = "teacher.prompt"


class TeacherPrompts:
    """Puts the template in the place of the question, and reads it as the prompt was read: with the same chat template,
    system prompt and earlier messages."""

    def __init__(self, template: str, tokenizer: Any, settings: DataSettings) -> None:
        self._template = template
        plain = settings.model_copy(
            update={"chat_template": "never", "system_prompt": None, "chat_template_kwargs": {}}
        )
        # A plain prompt already has its system prompt, in its text.
        self._readers = {True: PromptReader(tokenizer, settings, KEY), False: PromptReader(tokenizer, plain, KEY)}

    def check(self, prompts: Sequence[Prompt]) -> int:
        """The tokens of the longest; raises a UserError for a prompt that cannot be read with the template."""
        return max(map(len, self.tokens(prompts)))

    def tokens(self, prompts: Sequence[Prompt]) -> list[IntArray]:
        if "{answer}" in self._template and (bare := next((p for p in prompts if not (p.answer or "").strip()), None)):
            raise UserError(f"{KEY}: prompt {bare.id} has no answer; data.answer_key names its column")
        found: dict[int, IntArray] = {}
        for in_chat, reader in self._readers.items():
            own = [i for i, prompt in enumerate(prompts) if _in_chat(prompt) is in_chat]
            for i, reading in zip(own, reader.read([self._filled(prompts[i]) for i in own]), strict=True):
                if isinstance(reading, BadRowError):
                    raise UserError(f"{KEY}: prompt {prompts[i].id}: {reading}")
                found[i] = np.asarray(reading.token_ids, np.int32)
        return [found[i] for i in range(len(prompts))]

    def _filled(self, prompt: Prompt) -> str | Messages:
        answer = prompt.answer or ""
        if prompt.messages is None:
            return filled(self._template, {"prompt": prompt.question or prompt.text, "answer": answer})
        at = max((i for i, message in enumerate(prompt.messages) if message["role"] == "user"), default=0)
        message = prompt.messages[at]
        said = filled(self._template, {"prompt": message["content"], "answer": answer})
        return (*prompt.messages[:at], {**message, "content": said}, *prompt.messages[at + 1 :])


def _in_chat(prompt: Prompt) -> bool:
    return prompt.messages is not None or bool(prompt.question)
