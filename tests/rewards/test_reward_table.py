"""The table of answers, in every form of response; and docs/answers.md, which shows it."""

import pytest
from answer_table import DOCUMENT, FORMS, KINDS, render, rows, suits

from dapo_rl.config import RewardSettings
from dapo_rl.data.arithmetic import problems
from dapo_rl.rewards import MathVerifier
from dapo_rl.types import Prompt, Sample


def statuses(truth, texts):
    verdicts = MathVerifier(RewardSettings())(
        Prompt("p", "?", (1,), answer=truth), [Sample((), (), text, "stop") for text in texts]
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


def test_the_document_is_the_table():
    pytest.importorskip("math_verify")
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run python tests/rewards/answer_table.py"


def test_the_question_is_no_answer_to_it():
    for row in problems(split="train", size=300, seed=0):
        question, truth = row["prompt"].strip().removesuffix("=?"), row["answer"]
        repeated = [f"Answer: {question}", f"Answer: ${question}$", f"Answer:\n{question}", f"Answer: ({question})"]
        assert statuses(truth, [*repeated, f"Answer: {question}={truth}"]) == ["wrong"] * 4 + ["correct"], question
