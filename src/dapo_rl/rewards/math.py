"""The verifier of mathematics, which compares only the final answer with the ground truth, as in the paper."""

from __future__ import annotations

from collections.abc import Sequence

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards.answers import answers_equal, extract_answer, last_boxed
from dapo_rl.rewards.answers.evaluate import context
from dapo_rl.types import Prompt, Trajectory, Verdict


class MathVerifier:
    """Compares the last `Answer:` line with the ground truth. A truncated response is judged by its text."""

    needs_answer = True
    per_sample = True
    text_only = True

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings

    def warm_up(self) -> None:
        context()

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        truth = final_answer(ground_truth(prompt))
        answers = [extract_answer(sample.text, self.settings.boxed) for sample in samples]
        # Samples of a group often have the same answer.
        verdicts = {answer: self._verify(answer, truth) for answer in set(answers)}
        return [verdicts[answer] for answer in answers]

    def _verify(self, answer: str | None, truth: str) -> Verdict:
        correct, wrong = self.settings.correct, self.settings.wrong
        if answer is None:
            return Verdict(wrong, False, "unparseable")
        try:
            if answers_equal(answer, truth, self.settings.form):
                return Verdict(correct, True, "correct", answer)
            return Verdict(wrong, False, "wrong", answer)
        except Exception as error:
            return Verdict(wrong, False, "error", answer, f"{type(error).__name__}: {error}")


def ground_truth(prompt: Prompt) -> str:
    if prompt.answer is None or not prompt.answer.strip():
        raise UserError(
            f"prompt {prompt.id}: it has no ground truth to compare with; set data.answer_key to its column"
        )
    return prompt.answer


def final_answer(truth: str) -> str:
    """The ground truth, or the `\\boxed{…}` inside it if the data has worked solutions, as MATH does."""
    return last_boxed(truth) or truth.strip()
