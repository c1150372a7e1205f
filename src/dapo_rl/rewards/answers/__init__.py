"""Answers to mathematical problems: extraction from a response, and comparison with the ground truth."""

from dapo_rl.rewards.answers.compare import answers_equal, has_other_forms
from dapo_rl.rewards.answers.extract import MAX_ANSWER_CHARS, extract_answer, last_boxed
from dapo_rl.rewards.answers.normalize import normalize_answer

__all__ = ["MAX_ANSWER_CHARS", "answers_equal", "extract_answer", "has_other_forms", "last_boxed", "normalize_answer"]
