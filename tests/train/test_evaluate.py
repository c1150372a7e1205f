"""Held-out accuracy: on correctness, with failed verdicts apart."""

import math

import pytest
from support import ScriptedEngine, TextVerifier, make_prompt, make_sample

from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.train.evaluate import evaluate

TEXTS = {
    "eval-0": ["right", "right"],
    "eval-1": ["right", "wrong"],
    "eval-2": ["wrong", "wrong"],
    "eval-3": ["crash"] * 2,
}


def run(names):
    def script(request):
        return [
            make_sample(2 + i, finish_reason="length" if i else "stop", text=text)
            for i, text in enumerate(TEXTS[request.id])
        ]

    prompts = [make_prompt(str(i)) for i in range(len(names))]
    return evaluate(ScriptedEngine(script), TextVerifier(), prompts, SamplingParams(9), samples=2, seed=0)


def test_figures_by_hand():
    result = run(["eval-0", "eval-1", "eval-2"])
    assert result.accuracy == pytest.approx(3 / 6)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.response_length == pytest.approx(2.5)
    assert result.truncated == pytest.approx(0.5)
    assert result.verifier_errors == 0
    assert result.metrics()["eval/pass@2"] == pytest.approx(2 / 3)


def test_a_crash_is_no_wrong_answer_here_either():
    result = run(["eval-0", "eval-1", "eval-2", "eval-3"])
    assert result.accuracy == pytest.approx(3 / 6)
    assert result.reward == result.metrics()["eval/reward"] == pytest.approx((1 + 0 - 1) / 3)
    assert result.verifier_errors == 2
    assert result.first_error == "ValueError: it crashed"


def test_where_nothing_was_judged_there_is_no_accuracy():
    crash = evaluate(
        ScriptedEngine(lambda request: [make_sample(text="crash")]),
        TextVerifier(),
        [make_prompt("0")],
        SamplingParams(9),
        samples=1,
        seed=0,
    )
    assert math.isnan(crash.accuracy)
    assert math.isnan(crash.pass_at_k)
