"""A custom verifier that rewards correct answers, and more so if the working is shown.

    dapo train reward.verifier=examples/own_verifier.py:shows_its_work train.steps=2

The prompts of the built-in arithmetic data are sums such as `3+8+5=?`. The built-in model answers with lines such as
`3+8=11` and a last line `16`.
"""

import re

from dapo_rl.types import Prompt, Trajectory, Verdict

STEP = re.compile(r"(\d+)\s*([-+*])\s*(\d+)\s*=\s*(-?\d+)")


def shows_its_work(prompt: Prompt, samples: list[Trajectory]) -> list[Verdict]:
    """1 for a correct answer whose steps are all correct, 0.5 for one without correct steps, -1 for a wrong answer."""
    return [verdict(sample.text, prompt.answer or "") for sample in samples]


def verdict(response: str, truth: str) -> Verdict:
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return Verdict(score=-1.0, correct=False, status="unparseable")
    if numbers[-1] != truth:
        return Verdict(score=-1.0, correct=False, status="wrong", answer=numbers[-1])
    steps = STEP.findall(response)
    sound = bool(steps) and all(compute(int(a), sign, int(b)) == int(c) for a, sign, b, c in steps)
    return Verdict(score=1.0 if sound else 0.5, correct=True, status="correct", answer=numbers[-1])


def compute(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b
