"""Finds equal answers to a problem, so that a majority vote counts 1/2 and 0.5 together.

Answers are written by a model, so they are compared in a separate process with limits, like any verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapo_rl.config import RewardSettings
from dapo_rl.rewards.answers import answers_equal, extract_answer, normalize_answer
from dapo_rl.rewards.answers.evaluate import context
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.types import Group, Prompt, Trajectory, Verdict

PROBLEM_S = 60.0
"""Time limit for all comparisons of a problem."""


class Voting:
    """Turns the answers of a problem into votes."""

    def __init__(self, settings: RewardSettings, judged: bool = True) -> None:
        """`judged`: whether the verifier judges the samples, rather than their environment."""
        limits = {"timeout_s": PROBLEM_S, "workers": min(1, 1 if settings.workers is None else settings.workers)}
        is_math = judged and settings.verifiers[0].verifier == "math"
        self._pool = VerifierPool(_SameAnswers(), settings.model_copy(update=limits)) if is_math else None

    def votes(self, group: Group) -> list[str | None]:
        """The answer that each sample counts towards; None if it gave none or the verifier failed on it.

        For mathematics, all right answers are equal, and wrong ones are equal if the verifier's comparison says so.
        Otherwise answers are equal if their text is.
        """
        verdicts = group.verdicts
        if self._pool is None:
            return [_text_vote(sample, verdict) for sample, verdict in group.judged]
        answers = [None if verdict.failed else verdict.answer for verdict in verdicts]
        # The verifier has compared each with the ground truth already.
        right = next((verdict.answer for verdict in verdicts if verdict.correct), None)
        wrong = [a for a, v in zip(answers, verdicts, strict=True) if a is not None and not v.correct]
        names = dict(zip(wrong, self._names(group.prompt, wrong), strict=True))
        return [
            right if verdict.correct else None if answer is None else names[answer]
            for answer, verdict in zip(answers, verdicts, strict=True)
        ]

    def _names(self, prompt: Prompt, answers: Sequence[str]) -> list[str]:
        if self._pool is None or len(set(answers)) < 2:
            return list(answers)
        asked = self._pool(prompt, [Trajectory.of_text(answer) for answer in answers])
        return [a if v.answer is None else v.answer for a, v in zip(answers, asked, strict=True)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _equal(a: str, b: str) -> bool:
    """Compares both ways: the comparison is not symmetric."""
    return answers_equal(a, b) or answers_equal(b, a)


def same_answers(answers: Sequence[str], equal: Callable[[str, str], bool] = _equal) -> list[str]:
    """For each answer the first one equal to it, which represents their class."""
    names: dict[str, str] = {}
    by_spelling: dict[str, str] = {}
    for answer in dict.fromkeys(answers):
        spelling = normalize_answer(answer) or answer
        if spelling not in by_spelling:
            heads = dict.fromkeys(names.values())
            by_spelling[spelling] = next((head for head in heads if _decided(equal, answer, head)), answer)
        names[answer] = by_spelling[spelling]
    return [names[answer] for answer in answers]


class _SameAnswers:
    """The comparison as a verifier: texts are answers, and the verdicts' answers are their representatives."""

    def warm_up(self) -> None:
        context()

    def __call__(self, prompt: Prompt, samples: Sequence[Trajectory]) -> list[Verdict]:
        return [Verdict(0.0, False, "wrong", name) for name in same_answers([sample.text for sample in samples])]


def _decided(equal: Callable[[str, str], bool], given: str, other: str) -> bool:
    try:
        return equal(given, other)
    except Exception:  # a text that the comparison cannot handle
        return False


def _text_vote(sample: Trajectory, verdict: Verdict) -> str | None:
    if verdict.failed:
        return None
    return verdict.answer or extract_answer(sample.text) or sample.text.strip() or None
