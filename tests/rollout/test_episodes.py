"""Episodes: a verifier ends them with the first turn, and an environment of several turns continues them."""

import numpy as np
import pytest
from support import TextVerifier, make_prompt, make_sample

from dapo_rl.engines.protocol import Completion, Request, SamplingParams
from dapo_rl.envs import AtHand, OneTurn
from dapo_rl.errors import UserError
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.types import Observation, Trajectory, Verdict


class GuessingGame:
    """Says higher or lower until the number is right, or three guesses are wrong."""

    def step(self, prompt, turns):
        return AtHand([self._answer(int(prompt.answer), turn) for turn in turns])

    def _answer(self, number, turn):
        guess, guesses = int(turn.text), sum(span.author == "policy" for span in turn.turns) + 1
        if guess == number or guesses == 3:
            return Verdict(1.0 if guess == number else -1.0, guess == number, "correct" if guess == number else "wrong")
        return Observation("higher" if number > guess else "lower")


class Guesser:
    """An engine whose samples guess: sample i says i in its first turn, and then one more or one less each turn."""

    version = 3

    def __init__(self):
        self.requests = []

    def submit(self, request):
        self.requests.append(request)

    def poll(self, timeout_s=None):
        requests, self.requests = self.requests, []
        return [
            Completion(request.id, begun.index, self._turn(begun))
            for request in requests
            for begun in (*request.partial, *map(Trajectory.nothing, request.starting))
        ]

    def take_unfinished(self):
        requests, self.requests = self.requests, []
        return requests

    def _turn(self, begun):
        guess = begun.index
        if len(begun.token_ids):
            said = begun.token_ids[begun.turns[-1].start : begun.turns[-1].end].tolist()
            last = begun.token_ids[begun.turns[-2].start].item()
            guess = last + 1 if said == tokenize("higher") else last - 1
        done = begun.then([guess], [-0.5], self.version)
        return done.replace(text=str(guess), finish_reason="stop")


def tokenize(text):
    return [ord(letter) for letter in text]


def request(draw, prompt):
    return Request(f"draw-{draw}", prompt.token_ids, 4, SamplingParams(100), seed=draw)


def play(pause_at=None):
    """Four guessers of the number 2."""
    engine = Guesser()
    episodes = Episodes(engine, GuessingGame(), request, tokenize=tokenize)
    episodes.start(0, make_prompt("p", answer="2"))
    episodes.submitted = True
    done = []
    for turn in range(4):
        if turn == pause_at:  # with the environment
            episodes.poll()
            paused = episodes.pause()
            assert not len(episodes)
            episodes.unpause(paused)
        elif turn == (pause_at or 0) + 1:  # with the engine
            episodes.drain()
            assert not engine.requests
            episodes.resume()
        if episodes.generating:
            episodes.poll()
        done += episodes.finish(everything=True)
    (group,) = done
    return group


def test_a_verifier_ends_with_the_first_turn():
    samples = [make_sample(text="right"), make_sample(text="wrong")]
    answers = OneTurn(TextVerifier()).step(make_prompt("p"), samples)
    assert answers.done()
    assert [verdict.score for verdict in answers.result()] == [1.0, -1.0]


def test_episodes_of_several_turns_end_one_by_one():
    group = play()
    assert [sample.text for sample in group.samples] == ["2", "2", "2", "2"]
    assert [verdict.correct for verdict in group.verdicts] == [True] * 4
    first = group.samples[0]
    said = [*tokenize("higher")]
    assert first.token_ids.tolist() == [0, *said, 1, *said, 2]
    assert first.mask.tolist() == [True, *[False] * 6, True, *[False] * 6, True]
    assert [(turn.start, turn.end, turn.author) for turn in first.turns] == [
        (0, 1, "policy"), (1, 7, "environment"), (7, 8, "policy"), (8, 14, "environment"),
    ]  # fmt: skip
    assert [sample.written for sample in group.samples] == [3, 2, 1, 2]
    assert group.tokens == 8, "the environment's tokens do not count"


@pytest.mark.parametrize("pause_at", [0, 1])
def test_episodes_that_are_paused_with_the_engine_or_the_environment_continue(pause_at):
    assert play(pause_at) == play()


def test_an_environment_must_end_a_sample_that_was_cut_off():
    class Endless:
        def step(self, prompt, turns):
            return AtHand([Observation("more") for _ in turns])

    episodes = Episodes(Guesser(), Endless(), request)
    episodes.start(0, make_prompt("p"))
    episodes.poll()
    with pytest.raises(UserError, match="it has to end with a verdict"):
        list(episodes.finish(everything=True))


def test_turns_and_observations_are_one_sample_with_a_mask():
    """What the engine gets for the next turn: all tokens so far, those of the environment without a gradient."""

    first = make_sample(3, version=4)
    observed = np.arange(40, 42, dtype=np.int32)
    next_turn = first.then_observed(observed)
    assert next_turn.mask.tolist() == [True] * 3 + [False] * 2
    after = next_turn.then(np.int32([9]), np.float32([-1]), 5)
    assert after.mask.tolist() == [True] * 3 + [False] * 2 + [True]
    assert after.versions.tolist() == [4] * 5 + [5]
