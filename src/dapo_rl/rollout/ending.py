"""Where a response ends: end-of-sequence tokens and stop strings; and the sample that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_rl.types import FinishReason, Sample


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end-of-sequence token and what the model's generation configuration adds to it."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def stop_string_end(tokenizer: Any, ids: Sequence[int], strings: tuple[str, ...], seen: int = 0) -> int | None:
    """The number of tokens with which the text first contains a stop string; the first `seen` do not contain one."""
    # A string of n bytes lies within n tokens; a few more make up for tokens that have no text of their own.
    reach = max(len(string.encode()) for string in strings) + 8
    for end in range(seen + 1, len(ids) + 1):
        text = tokenizer.decode(ids[max(0, end - reach) : end], skip_special_tokens=True)
        if any(string in text for string in strings):
            return end
    return None


def make_sample(
    tokenizer: Any,
    token_ids: Sequence[int],
    logps: Sequence[float],
    finish_reason: FinishReason,
    stop_ids: frozenset[int],
    versions: tuple[int, int],
) -> Sample:
    """A finished response; the end-of-sequence token counts among its tokens and is not in its text."""
    text_ids = token_ids[:-1] if finish_reason == "stop" and token_ids[-1] in stop_ids else token_ids
    return Sample(
        token_ids=tuple(token_ids),
        logps=tuple(logps),
        text=tokenizer.decode(text_ids, skip_special_tokens=True),
        finish_reason=finish_reason,
        versions=versions,
    )
