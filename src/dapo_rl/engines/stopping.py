"""Where a response ends (end-of-sequence tokens, stop strings), and how it becomes a sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from dapo_rl.types import BoolArray, FinishReason, IntArray, Trajectory

MARGIN = 8
"""Tokens that are decoded before the first that can belong to a stop string: what stands at the start of a text can be
decoded differently, such as a space or the rest of a character."""
TORN = 3
"""The most bytes of a character after its first."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTINUATION_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
"""The tokens of bytes inside a character, in vocabularies of SentencePiece."""


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence tokens of the tokenizer and of the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


class StopStrings:
    """The stop strings of a request, and what a search for them needs to know about the tokenizer."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        # A string of n bytes spans at most n tokens that have text; cleaning up spaces can remove two of three.
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self.reach = max(len(string.encode()) for string in strings) * (3 if cleans else 1) + MARGIN
        """The number of tokens, among those with text, that are decoded with each new one."""
        self._special = frozenset(tokenizer.all_special_ids)
        self._silent: dict[int, bool] = {}

    def is_silent(self, token: int) -> bool:
        """Whether a token never has text: special tokens, and ids that the model has but the tokenizer does not."""
        silent = self._silent.get(token)
        if silent is None:
            absent = token in self._special or self._tokenizer.convert_ids_to_tokens(token) is None
            silent = self._silent[token] = absent and not self._tokenizer.decode([token], skip_special_tokens=True)
        return silent

    def continues(self, token: int) -> bool:
        """Whether a token is a single byte in the middle of a character."""
        return str(self._tokenizer.convert_ids_to_tokens(token)) in CONTINUATION_BYTES

    def ended_by(self, tokens: list[int], torn: bool) -> bool:
        """Whether the text of these tokens contains a stop string; if `torn`, others come before them."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if torn:  # the first of them may be the rest of a character
            text = text[min(TORN, len(text) - len(text.lstrip(REPLACEMENT))) :]
        return any(string in text for string in self._strings)


class StopSearch:
    """Finds where one response first contains a stop string. It is given the response in portions.

    Each token is decoded with the few before it, not with the whole response. The result is the same as that of
    decoding the whole response after every token, however it is divided.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._tail: list[int] = []
        """The last tokens that have text."""
        self._torn = False
        """Whether there were others before them."""
        self.count = 0
        """Tokens given so far."""

    def skip(self, ids: IntArray, mask: BoolArray | None = None) -> None:
        """Takes the tokens that the response already has. A stop string can begin in the turn in progress, which is
        what the policy wrote after the last token of the environment (`mask` is false), but not before it."""
        start = 0 if mask is None or mask.all() else int(np.flatnonzero(~mask)[-1]) + 1
        self.count += start
        for token in ids[start:].tolist():
            self._add(token)

    def find(self, ids: IntArray) -> int | None:
        """Takes the next tokens; returns the length of the response at which it first contains a stop string."""
        for token in ids.tolist():
            if self._add(token) and self._strings.ended_by(*self._window()):
                return self.count
        return None

    def _add(self, token: int) -> bool:
        """Returns whether the token can add text."""
        self.count += 1
        if self._strings.is_silent(token):
            return False
        self._tail.append(token)
        if len(self._tail) > 2 * (self._strings.reach + TORN):
            del self._tail[: -self._strings.reach - TORN]
            self._torn = True
        return True

    def _window(self) -> tuple[list[int], bool]:
        start = max(0, len(self._tail) - self._strings.reach)
        # Bytes from the middle of a character can spoil the text of those that follow.
        for _ in range(TORN):
            start -= start > 0 and self._strings.continues(self._tail[start])
        return self._tail[start:], self._torn or start > 0


def make_sample(
    tokenizer: Any, written: Trajectory, end: int, finish_reason: FinishReason, stop_ids: frozenset[int]
) -> Trajectory:
    """A finished response of `end` tokens. They include the end-of-sequence token; the text does not."""
    token_ids = written.token_ids[:end]
    in_text = token_ids[:-1] if finish_reason == "stop" and int(token_ids[-1]) in stop_ids else token_ids
    text = tokenizer.decode(in_text, skip_special_tokens=True)
    return written.until(end).replace(text=text, finish_reason=finish_reason)
