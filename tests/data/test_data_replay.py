"""Replay of hard prompts: which are replayed, how often, and that a resumed run draws the same."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.config import DataSettings
from dapo_rl.data import MixedStream, PromptStream, ReplayStream, SelectedStream, stream_of, training_prompts
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

SIZE = 8
TOKENS = np.array([1, 2, 3], np.int32)


def prompt_of(name, **fields):
    return Prompt(name, name, TOKENS, **fields)


def plain(count=60, seed=3):
    return PromptStream([prompt_of(f"p{number}") for number in range(count)], seed)


def replaying(stream=None, share=0.5, highest=0.25):
    return ReplayStream(stream or plain(), 3, share, highest)


def ids(prompts):
    return [prompt.id for prompt in prompts]


def played(stream, draws, dice):
    """Draws and judges, two groups behind the draws."""
    drawn, waiting = [], []
    for _ in range(draws):
        drawn.append(stream.draw())
        waiting.append(drawn[-1])
        if len(waiting) > 2:
            right = dice.choice([0, 0, 1, 2, 3, SIZE])
            stream.observe(waiting.pop(0), right, SIZE, 0 < right < SIZE)
    return ids(drawn)


@pytest.mark.parametrize(
    ("groups", "rate", "is_replayed"),
    [
        ([0], 0, False),  # never solved
        ([1], 1 / 8, True),
        ([2], 2 / 8, True),
        ([3], 3 / 8, False),
        ([8], 1, False),
        ([0, 3], 3 / 12, True),
        ([8, 0], 4 / 12, False),
        ([8, 0, 0], 2 / 14, True),
        ([1, 8], 8.5 / 12, False),  # learned
    ],
)
def test_prompts_that_were_seldom_solved_are_replayed(groups, rate, is_replayed):
    stream = replaying()
    prompt = stream.draw()
    for right in groups:
        stream.observe(prompt, right, SIZE, 0 < right < SIZE)
    assert stream.pass_rate(prompt) == pytest.approx(rate)
    soon = ids(stream.draw() for _ in range(40))
    assert (prompt.id in soon) == is_replayed
    assert soon.count(prompt.id) <= 1, "one group of a prompt at a time"


def test_a_prompt_that_is_skipped_is_not_replayed():
    """`sampling.skip_solved_epochs` with a bound that a solved prompt is below."""
    for epochs in (0, 1):
        stream = replaying(plain(40), share=0.9, highest=1.0)
        prompt = stream.draw()
        stream.observe(prompt, SIZE, SIZE, False)
        if epochs:
            stream.skip(prompt, epochs)
        assert (prompt.id in ids(stream.draw() for _ in range(30))) == (not epochs)


def test_the_share_of_replays_and_the_order_of_the_rest():
    """Every prompt stays hard: a quarter of the draws are replays, and the others are the epochs' order."""
    stream, drawn, order = replaying(plain(4000), share=0.25), [], plain(4000)
    for _ in range(4000):
        drawn.append(stream.draw())
        stream.observe(drawn[-1], 1, SIZE, True)
    seen = set()
    fresh = [prompt.id for prompt in drawn if not (prompt.id in seen or seen.add(prompt.id))]
    assert fresh == ids(order.draw() for _ in fresh)
    assert 1 - len(fresh) / 4000 == pytest.approx(0.25, abs=0.03)
    assert stream.epochs_drawn == len(fresh) / 4000


def test_nothing_is_replayed_while_nothing_is_known():
    one, other = replaying(share=0.9), plain()
    assert ids(one.draw() for _ in range(120)) == ids(other.draw() for _ in range(120))


@pytest.mark.parametrize("kind", ["plain", "mixed", "selected", "lazy"])
@given(before=st.integers(0, 150), pushed=st.integers(0, 3))
def test_a_resumed_run_draws_the_same(plain_tokenizer, kind, before, pushed):
    class Endless:
        def __iter__(self):
            return ({"prompt": f"p{n}"} for n in range(50))

    def make():
        if kind == "lazy":
            return replaying(stream_of(training_prompts(Endless(), plain_tokenizer, DataSettings()), 0))
        if kind == "mixed":
            names = ("a", "b")
            parts = {
                name: PromptStream([prompt_of(f"{name}:{i}", origin=name) for i in range(30)], 5, name)
                for name in names
            }
            return replaying(MixedStream(parts, {"a": 1, "b": 2}, 60))
        return replaying(SelectedStream(plain(), 3, SIZE, 4) if kind == "selected" else plain())

    stream, dice = make(), random.Random(4)
    drawn = []
    for _ in range(before):
        prompt = stream.draw()
        drawn.append(prompt)
        right = dice.choice([0, 1, 2, 3])
        stream.observe(prompt, right, SIZE, right > 0)
    stream.push_front(drawn[-pushed:] if pushed else [])
    copy, state = make(), dice.getstate()
    copy.restore(json.loads(json.dumps(stream.state())))
    expected = played(stream, 80, dice)
    dice.setstate(state)
    assert played(copy, 80, dice) == expected
    assert copy.state() == stream.state()


def test_a_prompt_that_is_pushed_back_is_not_replayed_as_well():
    stream = replaying(share=0.9)
    prompt = stream.draw()
    stream.observe(prompt, 1, SIZE, True)
    stream.push_front([prompt])
    assert ids(stream.draw() for _ in range(30)).count(prompt.id) == 1


def test_another_curriculum_than_the_checkpoint_s_is_refused():
    chosen = SelectedStream(plain(), 3, SIZE, 4)
    with pytest.raises(UserError, match=r"sampling\.replay_hard was 0 when"):
        replaying().restore(plain().state())
    for other in (plain(), chosen, MixedStream({"a": plain()}, {"a": 1}, 60)):
        with pytest.raises(UserError, match=r"sampling\.replay_hard was above 0 when"):
            other.restore(replaying().state())
    with pytest.raises(UserError, match=r"sampling\.selection was `informative` when"):
        replaying().restore(replaying(chosen).state())
    with pytest.raises(UserError, match=r"sampling\.selection was `uniform` when"):
        replaying(chosen).restore(replaying().state())
    for key, value in (
        ("history", {"p0": [1.0]}),
        ("history", {"p0": [2.0, 1.0]}),
        ("pool", ["p1"]),
        ("pool", ["p0", "p0"]),
    ):
        with pytest.raises(ValueError, match=f"{key} is inconsistent"):
            replaying().restore(replaying().state() | {"history": {"p0": [1.0, 8.0]}} | {key: value})
