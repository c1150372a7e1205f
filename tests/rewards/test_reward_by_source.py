"""verl's scoring by data_source: which part of a response counts, and what it is worth."""

from dataclasses import replace

import pytest
from support import make_prompt, make_sample

from dapo_rl.config import RewardSettings
from dapo_rl.rewards import build_verifier
from dapo_rl.rewards.by_source import by_source

GSM8K, MATH = "openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval"


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        (GSM8K, "so it is\n#### 1,080", "1080", 1),
        (GSM8K, "#### 3\n#### -4", "-4", 1),
        (GSM8K, "the answer is 1080", "1080", 0),
        (GSM8K, "#### 1081", "1080", 0),
        (GSM8K, "#### 1080" + " and so on" * 40, "1080", 0),
        (MATH, r"first \boxed{3}, then \boxed{\frac12}", "0.5", 1),
        (MATH, r"Answer: \frac12", r"\frac{1}{2}", 0),
        (MATH, r"\boxed{2}", r"it is \boxed{2}.", 1),
        ("math_dapo", "Answer: 34", "34", 1),
        ("math_dapo", r"\boxed{34}", "34", -1),
        ("aime2024", "Answer: 35", "34", -1),
    ],
)
def test_the_score_by_data_source(source, text, truth, score):
    result = by_source(source, text, truth)
    assert (result["score"], result["acc"]) == (score, score == 1)


def test_a_data_source_without_a_scoring_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="no scoring for the data_source 'codecontests'"):
        by_source("codecontests", "x", "1")
    verifier = build_verifier(RewardSettings(verifier="dapo_rl.rewards.by_source:by_source"))
    prompt = replace(make_prompt("p"), data_source="codecontests")
    (verdict,) = verifier(prompt, [make_sample(text="#### 2")])
    assert verdict.status == "error"
    (verdict,) = verifier(replace(prompt, data_source=GSM8K), [make_sample(text="#### 2")])
    assert (verdict.status, verdict.score, verdict.answer) == ("correct", 1, "2")
