"""Distinct random prompts of a given length, as text, so that every contender reads the same tokens."""

from __future__ import annotations

import random
from typing import Any

ATTEMPTS = 20


def random_prompts(tokenizer: Any, count: int, length: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    plain = [i for i in range(min(len(tokenizer), 50_000)) if i not in special]
    return [_random_text(tokenizer, plain, length, rng) for _ in range(count)]


def _random_text(tokenizer: Any, plain: list[int], length: int, rng: random.Random) -> str:
    """A text of `length` tokens, or nearly so many if the tokenizer keeps merging random pieces."""
    text, added = "", len(tokenizer("").input_ids)
    ids: list[int] = []
    for _ in range(ATTEMPTS):
        ids = ids[: length - added] + [rng.choice(plain) for _ in range(length - added - len(ids))]
        text = tokenizer.decode(ids)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) + added == length:
            break
    return text
