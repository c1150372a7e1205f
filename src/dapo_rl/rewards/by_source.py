"""Scores a row by its column `data_source`, as verl does without a reward function of your own.

`reward.verifier: dapo_rl.rewards.by_source:by_source`
"""

from __future__ import annotations

import re
from typing import Any

from dapo_rl.rewards.answers import answers_equal, extract_answer, last_boxed

MATH_SOURCES = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")
_MARKED = re.compile(r"#### (-?[0-9.,]+)", re.ASCII)
_TAIL = 300
"""Number of characters at the end in which verl looks for GSM8K's mark."""


def by_source(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """`openai/gsm8k`: 1 for the number after `####`, otherwise 0. MATH: 1 for the last `\\boxed{}`, otherwise 0.
    `math_dapo` and AIME: 1 for the last `Answer:` line, otherwise −1."""
    if data_source == "openai/gsm8k":
        marked = _MARKED.findall(solution_str[-_TAIL:])
        answer = marked[-1].replace(",", "") if marked else None
        correct, wrong = answer == ground_truth.strip(), 0.0
    elif data_source in MATH_SOURCES:
        answer = last_boxed(solution_str)
        correct, wrong = answer is not None and answers_equal(answer, last_boxed(ground_truth) or ground_truth), 0.0
    elif data_source in DAPO_SOURCES or data_source.startswith("aime"):
        answer = extract_answer(solution_str)
        correct, wrong = answer is not None and answers_equal(answer, last_boxed(ground_truth) or ground_truth), -1.0
    else:
        known = ", ".join(("openai/gsm8k", *MATH_SOURCES, *DAPO_SOURCES))
        raise ValueError(f"no scoring for the data_source {data_source[:80]!r}, only for {known}; set reward.verifier")
    return {"score": 1.0 if correct else wrong, "acc": correct, "pred": answer}
