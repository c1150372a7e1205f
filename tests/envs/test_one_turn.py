"""Environments: a verifier is one whose first step ends, and one with more turns fits the same protocol."""

import numpy as np
import pytest
from support import TextVerifier, make_prompt, make_sample

from dapo_rl.envs import OneTurn
from dapo_rl.types import Environment, Observation, Verdict


def converse(environment: Environment, prompt, replies):
    """The turns of a conversation and its verdict, as whoever samples would hold it."""
    turns = []
    for reply in replies:
        turns.append(make_sample(text=reply))
        answer = environment.step(prompt, turns)
        if isinstance(answer, Verdict):
            return turns, answer
        assert isinstance(answer, Observation)
    raise AssertionError("it did not end")


class GuessingGame:
    """Says higher or lower until the number is right, or three guesses are wrong."""

    def step(self, prompt, turns):
        guess, number = int(turns[-1].text), int(prompt.answer)
        if guess == number or len(turns) == 3:
            return Verdict(1.0 if guess == number else -1.0, guess == number, "correct" if guess == number else "wrong")
        return Observation("higher" if number > guess else "lower")


@pytest.mark.parametrize(("text", "score"), [("right", 1.0), ("wrong", -1.0)])
def test_a_verifier_ends_with_the_first_turn(text, score):
    turns, verdict = converse(OneTurn(TextVerifier()), make_prompt("p"), [text, "never said"])
    assert (len(turns), verdict.score) == (1, score)


def test_a_verifier_does_not_judge_a_second_turn():
    with pytest.raises(ValueError, match="judges one turn, not 2"):
        OneTurn(TextVerifier()).step(make_prompt("p"), [make_sample(), make_sample()])


def test_a_conversation_of_several_turns():
    turns, verdict = converse(GuessingGame(), make_prompt("p", answer="7"), ["5", "9", "7"])
    assert (len(turns), verdict.correct) == (3, True)


def test_turns_and_observations_are_one_sample_with_a_mask():
    """What the engine gets for the next turn: all tokens so far, those of the environment without a gradient."""

    first = make_sample(3, version=4)
    observed = np.arange(40, 42, dtype=np.int32)
    next_turn = first.then_observed(observed)
    assert next_turn.mask.tolist() == [True] * 3 + [False] * 2
    after = next_turn.then(np.int32([9]), np.float32([-1]), 5)
    assert after.mask.tolist() == [True] * 3 + [False] * 2 + [True]
    assert after.versions.tolist() == [4] * 5 + [5]
