"""The curriculum: informative prompts are drawn more often, none is starved, and a resumed run draws the same."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_rl.data import MixedStream, PromptStream, SelectedStream
from dapo_rl.data.selection import FLOOR, _mixed
from dapo_rl.errors import UserError
from dapo_rl.types import Prompt

SIZE = 8
BATCH = 16
TOKENS = np.array([1, 2, 3], np.int32)
PASS_RATES = {"easy": 1.0, "middle": 0.5, "hard": 0.0}


def prompt_of(name, **fields):
    return Prompt(name, name, TOKENS, **fields)


def prompts(each=50):
    return [prompt_of(f"{kind}{number}", data_source=kind) for kind in PASS_RATES for number in range(each)]


def selected(stream=None, seed=3):
    return SelectedStream(stream or PromptStream(prompts(), seed), seed, SIZE, BATCH)


def observe(stream, prompt, dice):
    right = sum(dice.random() < PASS_RATES[prompt.data_source] for _ in range(SIZE))
    stream.observe(prompt, right, SIZE, 0 < right < SIZE)


def played(stream, draws, dice=None):
    dice, drawn = dice or random.Random(1), []
    for _ in range(draws):
        drawn.append(stream.draw())
        observe(stream, drawn[-1], dice)
    return drawn


def share(drawn, kind):
    return sum(prompt.data_source == kind for prompt in drawn) / len(drawn)


def test_informative_prompts_are_drawn_more_often():
    stream = selected()
    assert share([stream.draw() for _ in range(90)], "middle") < 0.5  # nothing is known yet
    assert share(played(selected(), 600)[300:], "middle") > 0.75


def test_no_prompt_is_starved():
    stream = selected()
    played(stream, 300)
    for prompt in prompts():
        assert stream._probability(prompt) >= FLOOR
    assert {prompt.id for prompt in played(stream, 6000)} == {prompt.id for prompt in prompts()}


def test_all_prompts_are_drawn_while_they_are_alike():
    """Otherwise an epoch would leave prompts out for nothing."""
    stream = SelectedStream(PromptStream([prompt_of(f"p{i}") for i in range(200)], 1), 1, SIZE, BATCH)
    dice = random.Random(2)
    for _ in range(200):
        stream.observe(stream.draw(), 4, SIZE, dice.random() < 0.5)
    assert stream.epochs_drawn < 1.3


def test_what_was_hard_is_tried_again_when_the_policy_has_changed():
    stream = selected()
    hard = prompt_of("hard0", data_source="hard")
    for _ in range(4):
        stream.observe(hard, 0, SIZE, False)
    before = stream.chance(hard)
    for _ in range(4000):
        stream.observe(prompt_of("middle0", data_source="middle"), 4, SIZE, True)
    assert before < 0.3
    assert stream.chance(hard) > 0.5


def test_a_kind_that_was_not_seen_yet_is_no_better_than_all():
    """Otherwise data of many kinds would be drawn by how rare a kind is."""
    stream = selected()
    for number in range(64):
        stream.observe(prompt_of(f"p{number}", data_source="middle"), 0, SIZE, number % 4 == 0)
    assert stream.chance(prompt_of("new", data_source="new")) == pytest.approx(0.25, abs=0.02)


def test_memories_are_as_long_as_so_many_batches():
    """The history of a prompt reaches back to its last epoch, also where a step has hundreds of groups."""
    hard, chances = prompt_of("hard0", data_source="hard"), {}
    for batch in (BATCH, 32 * BATCH):
        stream = SelectedStream(PromptStream(prompts(), 3), 3, SIZE, batch)
        stream.observe(hard, 0, SIZE, False)
        for _ in range(4000):
            stream.observe(prompt_of("middle0", data_source="middle"), 4, SIZE, True)
        _, samples, _ = stream._faded(stream._prompts["hard0"], stream._own_memory)
        assert samples == pytest.approx(SIZE * math.exp(-4000 / (128 * batch)))
        chances[batch] = stream.chance(hard)
        stream.observe(hard, 0, SIZE, False)
        seen = SIZE + SIZE * math.exp(-4001 / (128 * batch))
        assert stream._prompts["hard0"] == [0, pytest.approx(seen), 4002], "the earlier results decay at the same rate"
    assert chances[32 * BATCH] < chances[BATCH] - 0.2


@pytest.mark.parametrize(("right", "informative", "better"), [(SIZE, True, True), (0, True, True), (4, False, False)])
def test_what_decides_besides_correctness_counts(right, informative, better):
    """Graded scores keep groups that are all right, and a filter drops mixed ones."""
    stream = selected()
    odd, usual = prompt_of("odd", data_source="middle"), prompt_of("usual", data_source="middle")
    for _ in range(20):
        stream.observe(odd, right, SIZE, informative)
        stream.observe(prompt_of("other", data_source="middle"), 4, SIZE, not informative)
    assert (stream.chance(odd) > stream.chance(usual) + 0.2) == better
    assert (stream.chance(odd) < stream.chance(usual) - 0.2) != better


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 32))
def test_the_chance_of_a_mixed_group_is_the_integral_over_pass_rates(right, wrong, size):
    """Against the mean over a grid of pass rates, with Jeffreys' prior."""
    angles = (np.arange(20_000) + 0.5) / 20_000 * math.pi / 2
    rates = np.sin(angles) ** 2  # uniform in the angle is Beta(1/2, 1/2)
    weights = rates**right * (1 - rates) ** wrong
    mixed = 1 - rates**size - (1 - rates) ** size
    assert _mixed(right, wrong, size) == pytest.approx((weights * mixed).sum() / weights.sum(), abs=1e-6)


@pytest.mark.parametrize("kind", ["plain", "mixed"])
@given(before=st.integers(0, 120), pushed=st.integers(0, 3))
def test_a_resumed_run_draws_the_same(kind, before, pushed):
    def make():
        if kind == "plain":
            return selected()
        parts = {
            name: PromptStream([prompt_of(f"{name}:{i}", data_source=name, origin=name) for i in range(40)], 5, name)
            for name in PASS_RATES
        }
        return selected(MixedStream(parts, {"easy": 1, "middle": 2, "hard": 1}, 120))

    stream, dice = make(), random.Random(4)
    drawn = played(stream, before, dice)
    stream.push_front(drawn[-pushed:] if pushed else [])
    copy, state = make(), dice.getstate()
    copy.restore(json.loads(json.dumps(stream.state())))
    expected = [prompt.id for prompt in played(stream, 50, dice)]
    dice.setstate(state)
    assert [prompt.id for prompt in played(copy, 50, dice)] == expected


def test_what_is_pushed_back_is_drawn_next():
    stream = selected()
    played(stream, 200)
    hard = [stream.find(f"hard{i}") for i in range(5)]
    stream.push_front(hard)
    assert [stream.draw() for _ in range(5)] == hard


def test_another_selection_than_the_checkpoint_s_is_refused():
    plain = PromptStream(prompts(), 3)
    with pytest.raises(UserError, match=r"sampling\.selection was `uniform`"):
        selected().restore(plain.state())
    with pytest.raises(UserError, match=r"sampling\.selection was `informative`"):
        plain.restore(selected().state())
    for key, value in (
        ("kinds", {"x": [1.0]}),
        ("prompts", {"x": [2.0, 1.0, 0.0]}),
        ("prompts", {"x": [-1.0, 1.0, 0.0]}),
        ("usual", [1.0]),
        ("usual", [-1.0, 1.0]),
    ):
        with pytest.raises(ValueError, match=f"{key}.* is inconsistent"):
            selected().restore(selected().state() | {key: value})
