"""Votes: which answers of a problem count as the same."""

from contextlib import closing

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import RewardSettings
from dapo_rl.evals.vote import Voting, same_answers
from dapo_rl.types import Group, Verdict


def verdict(answer, correct=False, status=None):
    return Verdict(0.0, correct, status or ("correct" if correct else "wrong"), answer)


def votes(verdicts, verifier="math", texts=None):
    samples = [make_sample(text=text) for text in texts or [""] * len(verdicts)]
    with closing(Voting(RewardSettings(verifier=verifier))) as voting:
        return voting.votes(Group(0, make_prompt("0"), tuple(samples), tuple(verdicts)))


def test_classes_are_named_by_who_came_first():
    assert same_answers(["7", "0.5", "\\frac{1}{2}", "7.0", "8", "1/2"]) == ["7", "0.5", "0.5", "7", "8", "0.5"]
    # Worked out or not: an answer that the comparison accepts in one order only.
    assert same_answers(["5", "2+3"]) == ["5", "5"]
    assert same_answers(["2+3", "5"]) == ["2+3", "2+3"]


def test_each_pair_of_classes_is_compared_once_at_most():
    asked = []

    def equal(a, b):
        asked.append((a, b))
        return a == "boom" and 1 / 0

    assert same_answers(["1", "2", "1", "boom", "2"], equal) == ["1", "2", "1", "boom", "2"]
    assert asked == [("2", "1"), ("boom", "1"), ("boom", "2")]


def test_right_answers_are_one_and_wrong_ones_are_compared():
    found = votes(
        [
            verdict("0.5", correct=True),
            verdict("2/4"),
            verdict("7"),
            verdict("\\frac{1}{2}", correct=True),
            verdict("7.00"),
            verdict(None, status="unparseable"),
            verdict("7", status="timeout"),
        ]
    )
    assert found == ["0.5", "2/4", "7", "0.5", "7", None, None]


def test_elsewhere_the_text_counts():
    verdicts = [verdict("7"), verdict("7.0"), verdict(None), verdict(None), verdict(None), verdict("7", status="error")]
    texts = ["", "", "so\nAnswer: 7", " left ", "", ""]
    assert votes(verdicts, "gym", texts) == ["7", "7.0", "7", "left", None, None]


@pytest.mark.parametrize(
    "hostile", ["9^{9^{9^{9}}}", "\\frac{" * 300, "__import__('os').system('id')", "\u202e7\x1b[2J"]
)
def test_hostile_answers_are_answers(hostile):
    assert votes([verdict(hostile), verdict("7"), verdict(hostile), verdict("7.0")]) == [hostile, "7", hostile, "7"]
