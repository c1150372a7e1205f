"""From names and functions to verifiers."""

import subprocess
import sys

import pytest

from dapo_rl.config import RewardSettings
from dapo_rl.errors import UserError
from dapo_rl.rewards import (
    CombinedVerifier,
    CustomVerifier,
    ExactVerifier,
    GymVerifier,
    MathVerifier,
    as_verifier,
    build_verifier,
)
from dapo_rl.types import Prompt, Trajectory, Verdict

PROMPT = Prompt("p", "?", (1,), answer="5")
SAMPLES = [Trajectory((), (), "Answer: 5.0", "stop"), Trajectory((), (), "5", "stop")]


class MyVerifier:
    def __call__(self, prompt, samples):
        return [Verdict(0.5, True, "correct") for _ in samples]


def my_verifier(prompt, samples):
    return [Verdict(0.25, False, "wrong") for _ in samples]


def trl_reward(completions, **columns):
    return [0.1] * len(completions)


@pytest.mark.parametrize(("name", "kind"), [("math", MathVerifier), ("exact", ExactVerifier), ("gym", GymVerifier)])
def test_names(name, kind):
    settings = RewardSettings(verifier=name, correct=3.0)
    for verifier in (build_verifier(settings), as_verifier(name, settings)):
        assert type(verifier) is kind
        assert verifier.settings.correct == 3.0


def test_names_judge_as_they_should():
    assert [v.correct for v in build_verifier(RewardSettings(verifier="math"))(PROMPT, SAMPLES)] == [True, False]
    assert [v.correct for v in build_verifier(RewardSettings(verifier="exact"))(PROMPT, SAMPLES)] == [False, True]


def test_a_function_s_name(tmp_path):
    (tmp_path / "r.py").write_text("def score(solution_str): return len(solution_str)", encoding="utf-8")
    verifier = build_verifier(RewardSettings(verifier=f"{tmp_path}/r.py:score"))
    assert isinstance(verifier, CustomVerifier)
    assert [v.score for v in verifier(PROMPT, SAMPLES)] == [11.0, 1.0]


def test_a_verifier_s_name(tmp_path):
    code = "from dapo_rl.types import Verdict\ndef v(prompt, samples): return [Verdict(9.0, True, 'correct')] * 2"
    (tmp_path / "v.py").write_text(code, encoding="utf-8")
    assert build_verifier(RewardSettings(verifier=f"{tmp_path}/v.py:v"))(PROMPT, SAMPLES)[0].score == 9.0


@pytest.mark.parametrize(
    ("name", "message"),
    [("maths", r"reward\.verifier: 'maths' .*did you mean math\?"), ("zzz", "module:name or file.py:name")],
)
def test_an_unknown_name(name, message):
    with pytest.raises(UserError, match=message):
        build_verifier(RewardSettings(verifier=name))


def test_functions_and_verifiers():
    assert as_verifier(trl_reward, RewardSettings())(PROMPT, SAMPLES)[0].score == 0.1
    mine = MyVerifier()
    assert as_verifier(mine, RewardSettings()) is mine
    assert as_verifier(my_verifier, RewardSettings()) is my_verifier
    built = MathVerifier(RewardSettings())
    assert as_verifier(built, RewardSettings()) is built


def test_a_list_is_summed():
    verifier = as_verifier(["math", trl_reward, MyVerifier()], RewardSettings())
    assert isinstance(verifier, CombinedVerifier)
    first, second = verifier(PROMPT, SAMPLES)
    assert (first.score, first.correct) == (1.6, True)
    assert (second.score, second.correct, second.status) == (pytest.approx(-0.4), False, "unparseable")
    weighted = as_verifier(["math", trl_reward], RewardSettings(), weights=[2.0, 10.0])
    assert weighted(PROMPT, SAMPLES)[0].score == 3.0


def test_a_list_of_one_is_that_one():
    assert type(as_verifier(["math"], RewardSettings())) is MathVerifier
    assert as_verifier([trl_reward], RewardSettings(), weights=[3.0])(PROMPT, SAMPLES)[0].score == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty"),
        (5, "cannot use a value of type int"),
        (MyVerifier, "MyVerifier: it is a class"),
        (lambda a, b: [], "fit no known signature"),
        (len, "fit no known signature"),
        (["math", "exakt"], "did you mean exact"),
    ],
)
def test_what_is_no_reward_function(given, message):
    with pytest.raises(UserError, match=message) as caught:
        as_verifier(given, RewardSettings())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_rewards_import_neither_torch_nor_sympy():
    code = "import sys, dapo_rl.rewards; print([m for m in ('torch', 'sympy', 'reasoning_gym') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
