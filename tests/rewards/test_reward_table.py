"""The table of answers, in every form of response; and docs/answers.md, which shows it."""

import pytest
from answer_table import DOCUMENT, FORM_ROWS, FORMS, KINDS, independent, render, rows, suits

from dapo_rl.config import RewardSettings
from dapo_rl.data.arithmetic import problems
from dapo_rl.rewards import MathVerifier, answers_equal
from dapo_rl.types import Prompt, Trajectory


def statuses(truth, texts, form="any"):
    verdicts = MathVerifier(RewardSettings(form=form))(
        Prompt("p", "?", (1,), answer=truth), [Trajectory((), (), text, "stop") for text in texts]
    )
    return [verdict.status for verdict in verdicts]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_answer_in_each_form(kind):
    texts = {
        FORMS[form].format(answer): "correct" if right else "wrong"
        for answers, right in ((kind.right, True), (kind.wrong, False))
        for answer in answers
        for form in FORMS
        if suits(form, answer)
    }
    judged = dict(zip(texts, statuses(kind.truth, list(texts)), strict=True))
    assert {text: status for text, status in judged.items() if status != texts[text]} == {}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_two_answers_are_wrong_with_the_right_one_among_them(kind):
    right = kind.right[0]
    for other in ("77", "z+7", "(7,8)"):
        for both in (f"{right} or {other}", f"{other}, {right}", f"{right}; {other}", f"\\{{{right},{other}\\}}"):
            assert statuses(kind.truth, [f"Answer: {both}", f"Answer:\n{both}"]) == ["wrong", "wrong"], both


def test_the_table_is_large_and_no_row_is_there_twice():
    table = [(kind.truth, answer) for kind, answer, _ in rows()]
    assert len(table) == len(set(table)) >= 300
    assert len(FORMS) >= 20
    assert min(sum(right for _, _, right in rows()), sum(not right for _, _, right in rows())) > 200


@pytest.mark.slow
def test_the_document_is_the_table():
    pytest.importorskip("math_verify")
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run python tests/rewards/answer_table.py"


@pytest.mark.parametrize(("truth", "same", "other"), FORM_ROWS)
def test_the_form_of_an_answer(truth, same, other):
    same = (truth, *same)
    answers = [f"Answer: {answer}" for answer in (*same, *other)]
    assert statuses(truth, answers) == ["correct"] * len(answers)
    assert statuses(truth, answers, form="same") == ["correct"] * len(same) + ["wrong"] * len(other)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_wrong_answer_is_wrong_in_any_form(kind):
    answers = [f"Answer: {answer}" for answer in kind.wrong]
    assert set(statuses(kind.truth, answers, form="same")) <= {"wrong"}
    assert statuses(kind.truth, [f"Answer: {kind.truth}"], form="same") == ["correct"]


def test_the_question_is_no_answer_to_it():
    for row in problems(split="train", size=300, seed=0):
        question, truth = row["prompt"].strip().removesuffix("=?"), row["answer"]
        repeated = [f"Answer: {question}", f"Answer: ${question}$", f"Answer:\n{question}", f"Answer: ({question})"]
        assert statuses(truth, [*repeated, f"Answer: {question}={truth}"]) == ["wrong"] * 4 + ["correct"], question


PAID_AS_A_LIST = [
    ("1,2,3", "(1,2,3)"),
    ("1,-2", "(1,-2)"),
    ("1,4", "(1,4)"),
    ("1,4", "(1;4)"),
    ("2,4", "(2,4)"),
    ("3, 5, 7", "(3,5,7)"),
    ("3,-\\frac{1}{2}", "(3,-\\frac12)"),
    ("6,8", "(6,8)"),
    ("\\frac{\\pi}{6}, \\frac{5\\pi}{6}", "\\left(\\frac{\\pi}{6},\\frac{5\\pi}{6}\\right)"),
    ("\\lambda = 2, 5", "(2,5)"),
]
"""A list in brackets, in its order, is paid for: the values are what counts. The table calls it wrong."""
NOT_READ = [
    ("(1,4)", "P(1,4)"),
    ("1.45\\text{ million}", "1,450,000"),
    ("1.45\\text{ million}", "1450000"),
    ("52_8", "52 \\text{ base } 8"),
    ("\\frac{3}{4}", "{3 \\over 4}"),
    ("\\text{DNE}", "dne"),
    ("e^{i\\pi/4}", "\\frac{\\sqrt{2}}{2}+\\frac{\\sqrt{2}}{2}i"),
    ("y = 2x + 3", "2x - y + 3 = 0"),
    ("y = 2x + 3", "y - 2x = 3"),
]
"""Right, and judged as wrong: stricter than a patient reader."""


def test_answers_that_were_written_without_a_look_at_the_verifier():
    cases = independent()
    missed = sorted((truth, answer) for truth, answer, right in cases if answers_equal(answer, truth) != right)
    assert missed == sorted([*PAID_AS_A_LIST, *NOT_READ])
    assert len(cases) > 5000
    assert len(missed) < 0.01 * len(cases)
