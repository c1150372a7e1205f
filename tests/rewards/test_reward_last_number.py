"""The last number of a response, with its sign."""

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import RewardSettings
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.last_number import find_last_number, last_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 15.", "15"),
        ("2 + 5 = 7", "7"),
        ("5 - 9 = -4.", "-4"),
        ("The answer is -4", "-4"),
        ("The answer is −4", "-4"),
        ("5 - 9 = - 4", "-4"),
        ("-4", "-4"),
        ("(-4)", "-4"),
        ("the difference of 84 - 12", "12"),
        ("84-12", "12"),
        ("the difference of (3) - 12", "12"),
        ("It costs $1,234.50 in all.", "1234.50"),
        ("3, 4 and 5, in 2024.", "2024"),
        ("1,2", "2"),
        ("a-4", "4"),
        ("No number here.", None),
        ("", None),
        ("٣", None),
        ("7" + "x" * 30_000, None),
    ],
)
def test_the_last_number(text, expected):
    assert find_last_number(text) == expected


def test_it_is_compared_as_a_number():
    assert last_number("", "that makes 12.0.", "12") == {"score": 1.0, "acc": True, "pred": "12.0"}
    assert last_number("", "that makes 1,000", "1,000")["acc"]
    assert last_number("", "12, or 13", "12") == {"score": -1.0, "acc": False, "pred": "13"}
    assert last_number("", "twelve", "12") == {"score": -1.0, "acc": False, "pred": None}
    with pytest.raises(ValueError, match="the ground truth 'x' is not a number"):
        last_number("", "12", "x")


def test_it_is_a_verifier_by_name():
    verifier = build_verifier(RewardSettings(verifier="dapo_rl.rewards.last_number:last_number"))
    samples = [make_sample(text="1 + 1 = 2."), make_sample(text="It is 3.")]
    assert [(v.score, v.correct, v.answer) for v in verifier(make_prompt("p"), samples)] == [
        (1.0, True, "2"),
        (-1.0, False, "3"),
    ]
