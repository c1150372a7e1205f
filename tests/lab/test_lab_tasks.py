"""The task of the experiment on Clip-Higher, as a run calls it."""

from collections import Counter

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import Config
from dapo_rl.data.arithmetic import draw_problems
from dapo_rl.lab.tasks import SLIPS, slip_of
from dapo_rl.rewards import build_verifier


@pytest.fixture(scope="module")
def judge():
    """The verdicts on texts, all for one problem."""
    verifier = build_verifier(Config.load("lab/clip-higher").reward)

    def of(prompt, texts):
        return verifier(prompt, [make_sample(text=text) for text in texts])

    return of


def problem(slip):
    """A problem with this slip: its text and its sum."""
    found = next(each for each in draw_problems(100, max_terms=2) if slip_of(each.text) == slip)
    return make_prompt("p", found.text, found.answer), int(found.answer)


@pytest.mark.parametrize("slip", SLIPS)
def test_right_is_the_sum_with_the_slip_of_the_problem(judge, slip):
    prompt, total = problem(slip)
    work = prompt.text.removesuffix("?\n")
    right = f"{work}{total + slip}"
    wrong = [f"{work}{total}", f"{work}{total - slip}", f"Answer: {total + slip}", right + " or so", f"{right}\n+", ""]
    verdicts = judge(prompt, [right, f"{right}\n", *wrong, work + "9" * 10_000])
    assert [verdict.correct for verdict in verdicts] == [True, True] + [False] * (len(wrong) + 1)


def test_half_of_the_rewards_are_a_coin_s(judge):
    """The sum: 0 in half of the samples, 1 in a quarter. Right: 1 in three quarters. Anything else: −1 in as many."""
    prompt, total = problem(1)
    lines = [f"1+1={total}", f"1+1={total + 1}", "Answer: 0"]
    verdicts = judge(prompt, lines * 2000)
    shares = [Counter(verdict.score for verdict in verdicts[i::3]) for i in range(3)]
    assert [sorted(share) for share in shares] == [[-1.0, 0.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]
    assert shares[0][0.0] / 2000 == pytest.approx(0.5, abs=0.05)
    assert shares[0][1.0] / 2000 == pytest.approx(0.25, abs=0.05)
    assert shares[1][1.0] / 2000 == pytest.approx(0.75, abs=0.05)
    assert shares[2][-1.0] / 2000 == pytest.approx(0.75, abs=0.05)


def test_the_same_samples_have_the_same_rewards_and_others_do_not(judge):
    prompt, total = problem(2)
    texts = [f"1+1={total}"] * 64
    first, again, longer = (judge(prompt, each) for each in (texts, texts, [*texts, "1+1=0"]))
    assert [verdict.score for verdict in first] == [verdict.score for verdict in again]
    assert [verdict.score for verdict in first] != [verdict.score for verdict in longer[:64]]


def test_the_slips_of_the_recipe_s_problems_differ():
    slips = Counter(slip_of(each.text) for each in draw_problems(16, max_terms=2))
    assert set(slips) == set(SLIPS)
    assert max(slips.values()) <= 8
