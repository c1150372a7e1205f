"""`reward.verifier` as a list with weights, and the names of its curves."""

import pytest
import yaml

from dapo_rl import choices
from dapo_rl.config import Config, RewardSettings, WeightedVerifier
from dapo_rl.errors import UserError
from dapo_rl.rewards import as_verifier, build_verifier
from dapo_rl.rewards.build import VERIFIERS, recorded_verifier
from dapo_rl.runs.resume import check_same_run
from dapo_rl.types import Prompt, RewardPart, Trajectory

PROMPT = Prompt("p1", "2+3=", (1, 2), "5")
SAMPLES = [Trajectory.of_text("Answer: 5"), Trajectory.of_text("5")]


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def brevity(completions): return [len(c) / 10 for c in completions]\n")


def built(text):
    return Config.build(yaml.safe_load(text))


RECIPE = """
reward:
  verifier:
    - math
    - {verifier: rewards.py:brevity, weight: 0.5, timeout_s: 3}
"""


def test_a_list_is_the_weighted_sum():
    config = built(RECIPE)
    first, second = build_verifier(config.reward)(PROMPT, SAMPLES)
    assert first.parts == (RewardPart("math", 1.0), RewardPart("brevity", 0.9, 0.5))
    assert (first.score, first.correct, first.answer) == (1.45, True, "5")
    assert (second.score, second.status) == (-1.0 + 0.05, "unparseable")


def test_the_command_line_and_the_resolved_settings_say_the_same():
    config = built(RECIPE)
    word = "reward.verifier=[math, {verifier: rewards.py:brevity, weight: 0.5, timeout_s: 3}]"
    assert Config.load(None, [word]) == config
    assert Config.build(config.resolved()).reward == config.reward


def test_a_single_name_in_a_list_is_the_name():
    assert Config.load(None, ["reward.verifier=[exact]"]).reward.verifier == "exact"
    assert Config.load(None, ["reward.verifier=[{verifier: exact}]"]) == Config.load(None, ["reward.verifier=exact"])
    weighted = Config.load(None, ["reward.verifier=[{verifier: exact, weight: 2}]"]).reward
    assert build_verifier(weighted)(PROMPT, SAMPLES)[1].score == 2.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("[math, rewards.py:brevity, math]", "math appears twice; keep one, with one weight"),
        ("[math, mth]", "'mth' is not one of math, exact, gym; did you mean math?"),
        ("[math, {verifier: exact, weight: .nan}]", "the weight of exact, nan, is not a finite number"),
        ("[math, {verifier: exact, weight: much}]", "the weight of exact, 'much', is not a finite number"),
        ("[math, {verifier: exact, timeout_s: 0}]", "the timeout_s of exact, 0, is not a number of seconds above 0"),
        ("[math, {verifier: exact, wieght: 1}]", "exact has an unknown key 'wieght'; did you mean weight?"),
        ("[math, {exact: 0.2}]", "cannot read {'exact': 0.2}; an entry is a name or {verifier: NAME, weight: 0.5}"),
        ("{math: 1, exact: 0.2}", "expected a name or a list, got {'math': 1, 'exact': 0.2}; an entry is a name or"),
        ("true", "expected a name or a list, got True; an entry is a name or {verifier: NAME, weight: 0.5}"),
        ("[]", "the list is empty; an entry is a name or {verifier: NAME, weight: 0.5}"),
        ("[{verifier: math, weight: 0}, {verifier: exact, weight: 0}]", "every weight is 0, so every reward is 0"),
    ],
)
def test_mistakes_are_one_line(value, told):
    with pytest.raises(UserError) as caught:
        Config.load(None, [f"reward.verifier={value}"])
    assert str(caught.value).startswith(f"reward.verifier: {told}")
    assert "\n" not in str(caught.value)


def test_the_names_of_the_settings_are_those_of_the_verifiers():
    assert tuple(VERIFIERS) == choices.VERIFIERS


def score(completions):
    return [1.0 for _ in completions]


def test_curves_have_names_of_their_own():
    def again():
        def score(completions):
            return [1.0 for _ in completions]

        return score

    functions = [score, again(), lambda completions: [0.0, 0.0], "rewards.py:brevity"]
    verdicts = as_verifier(functions, RewardSettings())(PROMPT, SAMPLES)
    assert [part.name for part in verdicts[0].parts] == ["score", "score_2", "lambda", "brevity"]


@pytest.mark.parametrize(
    ("functions", "weights", "told"),
    [
        ([score, "math"], [1.0], "reward weights: 1 for 2 reward functions; give one for each"),
        ([score, "math"], [1.0, float("inf")], "reward weights: inf is not finite"),
        ([score, "math"], [1.0, "2"], "reward weights: '2' is not a number"),
        ([score, "math"], [0, 0.0], "reward weights: all are 0, so every reward is 0; give one that is not"),
        ([score, score], None, "reward functions: score appears twice; give it once, with one weight"),
        (["math", "math"], None, "reward functions: math appears twice; give it once, with one weight"),
    ],
)
def test_mistakes_in_python_are_one_line(functions, weights, told):
    with pytest.raises(UserError) as caught:
        as_verifier(functions, RewardSettings(), weights)
    assert str(caught.value) == told


def test_what_a_run_records_of_functions_can_be_loaded_again():
    both = [lambda completions: [1.0], lambda completions: [2.0]]
    recorded = recorded_verifier([*both, "math"], [1.0, 0.5, 2.0])
    assert [entry.weight for entry in recorded] == [1.0, 0.5, 2.0]
    assert len({entry.verifier for entry in recorded}) == 3
    config = Config().model_copy(update={"reward": RewardSettings().model_copy(update={"verifier": recorded})})
    assert Config.build(config.resolved()).reward == config.reward
    assert recorded_verifier(score) == f"{__name__}:score"
    assert recorded_verifier("math") == "math"


def test_a_resumed_run_has_the_same_weights(tmp_path):
    def config(weight, limit=None):
        entries = [
            WeightedVerifier(verifier="math"),
            WeightedVerifier(verifier="exact", weight=weight, timeout_s=limit),
        ]
        return Config.build({"reward.verifier": entries})

    check_same_run(tmp_path, config(0.5), config(0.5, 3.0))
    with pytest.raises(UserError, match=r"reward\.verifier math, 0\.5 × exact → math, 0\.25 × exact"):
        check_same_run(tmp_path, config(0.5), config(0.25))
