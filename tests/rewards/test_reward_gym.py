"""reasoning-gym's scorers as a verifier."""

import sys

import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import GymVerifier
from dapo_rl.rewards.gym import _scorer, gym_answer
from dapo_rl.types import Prompt, Trajectory

reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is not installed: pip install 'dapo-rl[gym]'"
)

# All tasks of reasoning-gym 0.1.25 whose scorers evaluate the answer as Python.
EVALUATING = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]


def entry_prompt(name, index=0, **parameters):
    entry = reasoning_gym.create_dataset(name, size=index + 1, seed=3, **parameters)[index]
    columns = {**entry, "gym_parameters": parameters}
    return Prompt(f"{name}-{index}", entry["question"], (1,), entry["answer"], f"reasoning_gym:{name}", None, columns)


def judge(prompt, *texts, **settings):
    return GymVerifier(RewardSettings(**settings))(prompt, [Trajectory((), (), text, "stop") for text in texts])


@pytest.mark.parametrize(
    "name", ["basic_arithmetic", "chain_sum", "leg_counting", "spell_backward", "letter_counting", *EVALUATING]
)
def test_a_data_sets_own_answer_is_correct_and_another_is_not(name):
    prompt = entry_prompt(name)
    forms = [prompt.answer, f"<think>hm</think>\n<answer>\n{prompt.answer}\n</answer>", "<answer>no</answer>"]
    if "\n" not in prompt.answer:
        forms.insert(0, f"Let me see.\nAnswer: {prompt.answer}")
    verdicts = judge(prompt, *forms)
    assert [v.status for v in verdicts] == ["correct"] * (len(forms) - 1) + ["wrong"]
    assert [v.score for v in verdicts] == [1.0] * (len(forms) - 1) + [-1.0]
    assert verdicts[0].answer == prompt.answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 5\n<answer>6</answer>", "5"),
        ("<answer>5</answer> or <answer> 6 </answer>", "6"),
        ("<answer>5", "<answer>5"),
        ("</answer> <answer>", "</answer> <answer>"),
        ("  5 \n", "5"),
    ],
)
def test_where_the_answer_stands(text, answer):
    assert gym_answer(text) == answer


def test_a_solution_other_than_the_stored_one_counts():
    prompt = Prompt(
        "c", "?", (1,), "4*5+3", "reasoning_gym:countdown", None, {"metadata": {"numbers": [3, 4, 5], "target": 23}}
    )
    assert [v.status for v in judge(prompt, "Answer: 3 + (5*4)", "Answer: 3 + 5 + 4")] == ["correct", "wrong"]


@pytest.mark.parametrize("other", ["{} 7", "{}, 104", "{} or", "7 {}", "{}{}"])
def test_the_right_answer_among_others_is_not_paid(other):
    prompt = Prompt("c", "?", (1,), "-103", "reasoning_gym:chain_sum")
    both = other.format("-103", "-103")
    assert [v.status for v in judge(prompt, "Answer: -103", f"Answer: {both}", both)] == ["correct", "wrong", "wrong"]


def test_the_threshold_decides_on_partial_scores(monkeypatch):
    prompt = entry_prompt("chain_sum")
    scorer, _ = _scorer("chain_sum", "{}")
    scores = {"a": 0.49, "b": 0.5, "c": 1.0}
    monkeypatch.setattr(scorer, "score_answer", lambda answer, entry: scores[answer])
    assert [v.correct for v in judge(prompt, "a", "b", "c")] == [False, False, True]
    assert [v.correct for v in judge(prompt, "a", "b", "c", threshold=0.5)] == [False, True, True]
    assert [v.correct for v in judge(prompt, "a", "b", "c", threshold=1.5)] == [False, False, True]


def test_a_scorer_that_crashes_is_a_failure(monkeypatch):
    prompt = entry_prompt("chain_sum")
    scorer, _ = _scorer("chain_sum", "{}")

    def crash(answer, entry):
        raise KeyError("metadata")

    monkeypatch.setattr(scorer, "score_answer", crash)
    (verdict,) = judge(prompt, "5")
    assert (verdict.status, verdict.failed, verdict.correct) == ("error", True, False)
    assert "KeyError" in verdict.detail


def test_an_answer_that_a_working_scorer_cannot_read_is_unparseable():
    prompt = entry_prompt("prime_factorization")
    wrong, right = judge(prompt, "Answer: two", f"Answer: {prompt.answer}")
    assert (wrong.status, wrong.failed, right.status) == ("unparseable", False, "correct")
    assert "ValueError" in wrong.detail


def test_scorers_are_made_once_for_each_set_of_parameters(monkeypatch):
    made = []
    create = reasoning_gym.create_dataset
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda name, **kw: made.append(kw) or create(name, **kw))
    _scorer.cache_clear()
    plain, small = entry_prompt("puzzle24"), entry_prompt("puzzle24", max_value=9)
    made.clear()
    for prompt in (plain, small, plain, small):
        assert judge(prompt, prompt.answer)[0].correct
    assert made == [{"size": 1, "seed": 0}, {"max_value": 9, "size": 1, "seed": 0}]


@pytest.mark.parametrize("name", EVALUATING)
def test_a_scorer_that_evaluates_answers_gets_no_code(name, tmp_path):
    marker = tmp_path / "ran"
    prompt = entry_prompt(name)
    code = f"__import__('os').system('touch {marker}')"
    verdicts = judge(prompt, code, f"[{code}]", f"Answer: {code}", f"<answer>1 + {code}</answer>", "9**9**9**9")
    assert [v.status for v in verdicts] == ["wrong"] * 5
    assert not marker.exists()
    reasoning_gym.create_dataset(name, size=1).score_answer(code, {**prompt.columns})
    assert marker.exists(), "the scorer evaluates no code: it need not be in the list"


def test_what_is_not_a_gym_prompt_is_the_users_mistake():
    with pytest.raises(UserError, match=r"prompt q1: .*data_source is 'gsm8k'"):
        judge(Prompt("q1", "?", (1,), "5", "gsm8k"), "5")
    with pytest.raises(UserError, match=r"no such data set; did you mean chain_sum\?"):
        judge(Prompt("q1", "?", (1,), "5", "reasoning_gym:chain_sums"), "5")
    with pytest.raises(UserError, match="cannot be created"):
        judge(Prompt("q1", "?", (1,), "5", "reasoning_gym:chain_sum", None, {"gym_parameters": {"no_such": 1}}), "5")


def test_without_reasoning_gym_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _scorer.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'dapo-rl\[gym\]'"):
        judge(Prompt("q1", "?", (1,), "5", "reasoning_gym:chain_sum"), "5")
