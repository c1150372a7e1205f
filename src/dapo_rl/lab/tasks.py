"""The task of an experiment of docs/evidence.md that needs exploration, as a reward function.

`reward.verifier: dapo_rl.lab.tasks:plus_ten`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_ANSWER = re.compile(r"Answer: (-?\d{1,9})\s*$")


def plus_ten(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the answer that is ten more than the sum, otherwise −1.

    The embedded model gives it in a few of a hundred samples, as one of its slips.
    """
    return [1.0 if _given(text) == int(truth) + 10 else -1.0 for text, truth in zip(completions, answer, strict=True)]


def _given(text: str) -> int | None:
    found = _ANSWER.search(text)
    return int(found[1]) if found else None
