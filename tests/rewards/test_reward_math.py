"""The verifier for mathematics, on the real answers of GSM8K and AIME 2024."""

import json
from pathlib import Path

import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import ExactVerifier, MathVerifier
from dapo_rl.types import Prompt, Trajectory

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets are not there: {DATA}")


def judge(truth, *texts, verifier=MathVerifier, reward=None, finish="stop"):
    prompt = Prompt("p7", "?", (1,), answer=truth)
    return verifier(reward or RewardSettings())(prompt, [Trajectory((5,), (-1.0,), text, finish) for text in texts])


def statuses(*args, **kwargs):
    return [verdict.status for verdict in judge(*args, **kwargs)]


@needs_data
@pytest.mark.parametrize(
    ("name", "rows"), [pytest.param("gsm8k-train.jsonl", 7473, marks=pytest.mark.slow), ("gsm8k-test.jsonl", 1319)]
)
def test_every_answer_of_gsm8k(name, rows):
    answers = [json.loads(line)["answer"].split("####")[1].strip() for line in (DATA / name).open(encoding="utf-8")]
    assert len(answers) == rows
    for answer in answers:
        number = int(answer.replace(",", ""))
        texts = [
            f"So we get it.\nAnswer: {number:,}",
            f"Answer: ${number:,}",
            f"Answer: {number}.0",
            f"Answer: {number + 1}",
        ]
        assert statuses(answer, *texts) == ["correct"] * 3 + ["wrong"], answer


@needs_data
def test_every_answer_of_aime_2024():
    pq = pytest.importorskip("pyarrow.parquet")
    truths = [row["ground_truth"] for row in pq.read_table(DATA / "aime-2024.parquet")["reward_model"].to_pylist()]
    assert len(truths) == 960
    for truth in set(truths):
        number = int(truth)
        texts = [
            f"Answer: {number:03d}",
            rf"Answer: $\boxed{{{number}}}$",
            f"**Answer:** {number}",
            f"Answer: {1000 - number}",
        ]
        expected = ["correct"] * 3 + ["correct" if number == 500 else "wrong"]
        assert statuses(truth, *texts) == expected, truth


def test_the_scores_are_the_settings_and_the_answer_is_kept():
    right, wrong, nothing = judge("42", "Answer: 42.0", "Answer: 43", "42")
    assert (right.score, right.correct, right.status, right.answer) == (1.0, True, "correct", "42.0")
    assert (wrong.score, wrong.correct, wrong.status, wrong.answer) == (-1.0, False, "wrong", "43")
    assert (nothing.score, nothing.correct, nothing.status, nothing.answer) == (-1.0, False, "unparseable", None)
    assert not any(verdict.failed for verdict in (right, wrong, nothing))
    custom = RewardSettings(correct=2.0, wrong=0.5)
    assert [v.score for v in judge("42", "Answer: 42", "Answer: 43", reward=custom)] == [2.0, 0.5]


def test_a_truncated_response_counts_by_its_text():
    assert statuses("42", "Answer: 42\nLet me check that ag", finish="length") == ["correct"]


def test_the_box_counts_where_the_setting_says_so():
    assert statuses("42", r"so \boxed{42}") == ["unparseable"]
    assert statuses("42", r"so \boxed{42}", reward=RewardSettings(boxed=True)) == ["correct"]


def test_a_worked_solution_as_ground_truth():
    assert statuses(r"We have $1+1=\boxed{2}$.", "Answer: 2", "Answer: 3") == ["correct", "wrong"]


def test_equal_answers_of_a_group_are_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr("dapo_rl.rewards.math.answers_equal", lambda *args: compared.append(args[0]) or False)
    assert statuses("2", "Answer: 1", "Answer: 1", "x", "Answer: 3") == ["wrong", "wrong", "unparseable", "wrong"]
    assert sorted(compared) == ["1", "3"]


@pytest.mark.parametrize("verifier", [MathVerifier, ExactVerifier])
@pytest.mark.parametrize("truth", [None, "", "  "])
def test_a_prompt_without_ground_truth_is_the_users_mistake(verifier, truth):
    with pytest.raises(UserError, match=r"prompt p7: .*data\.answer_key") as caught:
        judge(truth, "Answer: 1", verifier=verifier)
    assert "\n" not in str(caught.value)


def test_exact_is_exact():
    expected = ["correct", "correct", "wrong", "wrong", "wrong"]
    assert statuses("abc d", "abc d", "\n abc d ", "abc  d", "Answer: abc d", "", verifier=ExactVerifier) == expected
    assert [v.score for v in judge("7", "7", "8", verifier=ExactVerifier)] == [1.0, -1.0]
