"""Where a response ends (end-of-sequence tokens, stop strings), and how it becomes a sample."""

from __future__ import annotations

from typing import Any

from dapo_rl.rollout.engine import Begun
from dapo_rl.types import FinishReason, IntArray, Sample


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence tokens of the tokenizer and of the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def stop_string_end(tokenizer: Any, ids: IntArray, strings: tuple[str, ...], seen: int = 0) -> int | None:
    """The number of tokens after which the text first contains a stop string; the first `seen` contain none."""
    # A string of n bytes spans at most n tokens, plus a few that decode to no text.
    reach = max(len(string.encode()) for string in strings) + 8
    for end in range(seen + 1, len(ids) + 1):
        text = tokenizer.decode(ids[max(0, end - reach) : end], skip_special_tokens=True)
        if any(string in text for string in strings):
            return end
    return None


def make_sample(
    tokenizer: Any, written: Begun, end: int, finish_reason: FinishReason, stop_ids: frozenset[int]
) -> Sample:
    """A finished response of `end` tokens. They include the end-of-sequence token; the text does not."""
    token_ids = written.token_ids[:end]
    in_text = token_ids[:-1] if finish_reason == "stop" and int(token_ids[-1]) in stop_ids else token_ids
    return Sample(
        token_ids=token_ids,
        logps=written.logps[:end],
        text=tokenizer.decode(in_text, skip_special_tokens=True),
        finish_reason=finish_reason,
        versions=written.versions[:end],
        mask=written.mask[:end],
    )
