"""The verifier that compares the whole response with the ground truth."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.config import RewardSettings
from dapo_rl.rewards.math import ground_truth
from dapo_rl.types import Prompt, Trajectory, Verdict


class ExactVerifier:
    """Correct if the response, without surrounding white space, is the ground truth."""

    needs_answer = True
    per_sample = True
    text_only = True

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        truth = ground_truth(prompt).strip()
        right = Verdict(self.settings.correct, True, "correct")
        wrong = Verdict(self.settings.wrong, False, "wrong")
        return [right if sample.text.strip() == truth else wrong for sample in samples]
