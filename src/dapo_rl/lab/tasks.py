"""The task of the experiment on Clip-Higher in docs/evidence.md, as a reward function.

`reward.verifier: dapo_rl.lab.tasks:secret_slip`
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence

from dapo_rl.types import Prompt, Trajectory, Verdict

SLIPS = (-2, -1, 1, 2)
NOISE = 0.5
"""The share of rewards that a coin decides."""

_RESULT = re.compile(r"=(-?\d{1,9})\s*$")


def secret_slip(prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
    """Correct is the result that the problem's secret slip makes of the sum, as in `3+8=12`.

    The reward is 1 for it, 0 for the sum itself and −1 for anything else; but for half of the samples a coin chooses
    between 1 and −1. Which slip it is depends on the problem alone, so that no problem says anything about another.
    The coin is a hash of the samples: the same samples have the same rewards.
    """
    truth = int(prompt.answer or 0)
    right = truth + slip_of(prompt.text)
    coin = random.Random("\0".join([prompt.text, *(sample.text for sample in samples)]))
    verdicts = []
    for sample in samples:
        given = _result(sample.text)
        correct = given == right
        reward = 1.0 if correct else 0.0 if given == truth else -1.0
        if coin.random() < NOISE:
            reward = 1.0 if coin.random() < 0.5 else -1.0
        verdicts.append(Verdict(reward, correct, "correct" if correct else "wrong"))
    return verdicts


def slip_of(problem: str) -> int:
    """The slip of a problem: a hash of its text chooses."""
    return SLIPS[hashlib.sha256(problem.encode()).digest()[1] % len(SLIPS)]


def _result(text: str) -> int | None:
    found = _RESULT.search(text)
    return int(found[1]) if found else None
