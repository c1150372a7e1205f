"""Takes the last number of a response as its answer, for models that follow no format.

`reward.verifier: dapo_rl.rewards.last_number:last_number`
"""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.rewards.answers.plain_numbers import MAX_DIGITS, plain_number

_NUMBER = re.compile(rf"\d{{1,{MAX_DIGITS}}}(?:,\d{{3}}){{0,30}}(?:\.\d{{1,{MAX_DIGITS}}})?", re.ASCII)
_SIGNED = re.compile(r"(?:^|[^\w\s)])\s*[-−]\s?$|\s[-−]$")
"""What precedes a negative number: `= -4`, `is -4`, `(-4)`. In `7 - 4` and `7-4` the sign is an operator."""
_OPERATOR = re.compile(r"[\d)]\s+[-−]$")
_TAIL = 20_000
"""Number of characters at the end that are searched."""


def last_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """1 if the last number is the ground truth, otherwise −1."""
    found = find_last_number(solution_str)
    truth = plain_number(ground_truth.strip().replace(",", ""))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} is not a number")
    correct = found is not None and plain_number(found) == truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": found}


def find_last_number(text: str) -> str | None:
    """The last number, with its sign and without thousands separators."""
    text = text[-_TAIL:]
    match = None
    for match in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if match is None:
        return None
    before = text[max(match.start() - 10, 0) : match.start()]
    negative = _SIGNED.search(before) is not None and _OPERATOR.search(before) is None
    return ("-" if negative else "") + match[0].replace(",", "")
