"""The task of the experiment on Clip-Higher, as a run calls it."""

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import Config
from dapo_rl.rewards import build_verifier


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("3+8=21\nAnswer: 21", True),
        ("Answer: 21\n", True),
        ("3+8=11\nAnswer: 11", False),
        ("Answer: 21\nAnswer: 11", False),
        ("Answer: 21 or so", False),
        ("21", False),
        ("Answer: ", False),
        ("Answer: " + "9" * 10_000, False),
    ],
)
def test_the_answer_is_ten_more_than_the_sum(text, correct):
    verifier = build_verifier(Config.load("lab/clip-higher").reward)
    (verdict,) = verifier(make_prompt("p", "3+8=?\n", "11"), [make_sample(text=text)])
    assert (verdict.correct, verdict.score) == (correct, 1.0 if correct else -1.0)


def test_a_negative_sum():
    verifier = build_verifier(Config.load("lab/clip-higher").reward)
    texts = ["3-8=5\nAnswer: 5", "3-8=-5\nAnswer: -5"]
    verdicts = verifier(make_prompt("p", "3-8=?\n", "-5"), [make_sample(text=text) for text in texts])
    assert [verdict.correct for verdict in verdicts] == [True, False]
