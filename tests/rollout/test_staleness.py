"""Pacing: no group is trained on later than the bound allows, and no good group is ever left out."""

import copy
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Prompts, small_model, tokenizer, weights_of

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Request, SamplingParams
from dapo_rl.engines.token_sampling import derive_seed
from dapo_rl.envs import OneTurn
from dapo_rl.lab.simulated_engine import SimulatedEngine
from dapo_rl.lab.simulated_world import EndlessPrompts, SaysSo, World
from dapo_rl.rollout.episodes import Episodes
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.rollout.staleness import Ahead, may_start
from dapo_rl.types import Verdict


def run_of(world, slots, steps, n, **changes):
    """The fills of a run on the simulated engine. Weights change after each."""
    engine = SimulatedEngine.counting_steps(world, slots)
    chosen = SamplingSettings(group_size=world.group, prompts_per_step=n, **changes)
    sampler = Sampler(EndlessPrompts(), engine, SaysSo(), SamplingParams(4096), chosen, cap=10**6, seed=0)
    fills, generated = [], 0
    for version in range(steps):
        fill = sampler.fill(n)
        fills.append(fill)
        generated += fill.tokens_generated
        assert engine.tokens == generated + sampler.in_flight_tokens
        engine.receive(version + 1, None)
    settled = sum(group.tokens for fill in fills for group in (*fill.kept, *(group for group, _ in fill.dropped)))
    assert generated == settled + sampler.carried_tokens
    return fills


@dataclass(frozen=True)
class Listed(World):
    """Prompts take their lengths and outcomes from lists, again and again."""

    all_lengths: tuple[int, ...] = (1,)
    outcomes: tuple[bool, ...] = (True,)

    def lengths(self, prompt):
        number = int(prompt[1:])
        return tuple(self.all_lengths[(number + 3 * i) % len(self.all_lengths)] for i in range(self.group))

    def passes(self, prompt):
        return self.outcomes[int(prompt[1:]) % len(self.outcomes)]


@st.composite
def outcomes_in_runs(draw):
    """Rates that hold for some time: few groups pass for a while, then all of them."""
    spells = draw(st.lists(st.tuples(st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(1, 80)), max_size=5))
    rng = random.Random(draw(st.integers(0, 99)))
    return [*(rng.random() < rate for rate, count in spells for _ in range(count)), True]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 100]), min_size=1, max_size=5),
    outcomes=st.one_of(st.lists(st.booleans(), min_size=1, max_size=40).filter(any), outcomes_in_runs()),
    staleness=st.integers(0, 3),
    ahead=st.sampled_from([0.0, 0.5, 3.0]),
    slots=st.sampled_from([2, 9, 10**6]),
    n=st.integers(1, 5),
)
def test_no_group_is_older_than_the_bound_and_no_good_one_is_left_out(lengths, outcomes, staleness, ahead, slots, n):
    world = Listed(0, 2, all_lengths=tuple(lengths), outcomes=tuple(outcomes))
    fills = run_of(world, slots, 8, n, max_staleness=staleness, ahead=ahead)
    kept = [group.prompt.id for fill in fills for group in fill.kept]
    numbers = range(int(kept[-1][1:]) + 1)
    assert kept == [f"p{number}" for number in numbers if world.passes(f"p{number}")]
    for fill in fills:
        ages = [fill.version - group.first_version for group in fill.kept]
        assert len(ages) >= n
        assert max(ages) <= staleness
        assert all(age == staleness for age in ages[n:]), "only groups that would be too old exceed the batch"
        assert {outcome for _, outcome in fill.dropped} <= {"all_wrong"}
        assert fill.tokens_cancelled == 0
        if staleness == 0:
            assert (len(fill.kept), fill.carried_over, fill.in_flight) == (n, 0, 0)


def test_the_batch_is_larger_where_all_groups_pass_after_a_time_without_any():
    """After 200 groups that fail, the sampler expects few of the next ones to pass, and starts many. All of them pass:
    those of the first step are trained on within the bound."""
    world = Listed(0, 2, outcomes=(*[False] * 200, *[True] * 60))
    for staleness, sizes in (1, [4, 54]), (2, [4, 4, 52]), (3, [4, 4, 4, 48]):
        fills = run_of(world, 10**6, staleness + 1, 4, max_staleness=staleness)
        assert [len(fill.kept) for fill in fills] == sizes
        assert {group.first_version for fill in fills for group in fill.kept} == {0}
        assert (fills[-1].carried_over, fills[-1].in_flight) == (0, 0)


def test_a_group_in_flight_counts_with_its_chance_and_a_margin():
    """194 groups that pass at 10 %: 19.4 + 3 · √17.46 = 31.94, below 2 · 16. One more: 32.07."""
    pace, ahead = SamplingSettings(max_staleness=1), Ahead(0)
    for _ in range(194):
        ahead.add(0.1)
    assert may_start(pace, 16, ahead)
    ahead.add(0.1)
    assert not may_start(pace, 16, ahead)
    assert may_start(SamplingSettings(surplus="drop"), 16, ahead)
    assert not may_start(SamplingSettings(max_staleness=0), 194, ahead)
    assert may_start(SamplingSettings(max_staleness=0), 196, ahead)


def test_the_margin_counts_no_more_groups_than_there_are():
    ahead = Ahead(1)
    for _ in range(2):
        ahead.add(0.5)
    assert ahead.most == 3
    assert Ahead(5).most == 5


def test_a_share_of_a_batch_is_in_flight_ahead_of_it():
    """Without a filter the batch needs 8 groups, and 4 more are under way. Long ones do not keep the engine idle."""
    world = Listed(0, 2, all_lengths=(*[1] * 19, 100))
    steps = {}
    for ahead in (0.0, 0.5, 3.0):
        engine = SimulatedEngine.counting_steps(world, 10**6)
        chosen = SamplingSettings(group_size=2, prompts_per_step=8, dynamic=False, ahead=ahead)
        sampler = Sampler(EndlessPrompts(), engine, SaysSo(), SamplingParams(4096), chosen, cap=10**6, seed=0)
        fills = []
        for version in range(40):
            fills.append(sampler.fill(8))
            engine.receive(version + 1, None)
        assert {len(fill.kept) for fill in fills} == {8}
        waiting = [fill.carried_over + fill.in_flight for fill in fills]
        assert waiting[0] == max(waiting) == min(8, 8 * ahead), "max_staleness allows one batch"
        steps[ahead] = engine.steps
    assert steps[3.0] < steps[0.5] < steps[0.0]


@dataclass(frozen=True)
class FastAndSlow(World):
    """Half of the prompts take 100 times as long as the others, and acceptance goes up and down."""

    def is_slow(self, prompt):
        return random.Random(f"slow:{prompt}").random() < 0.5

    def lengths(self, prompt):
        return (100 if self.is_slow(prompt) else 1,) * self.group

    def passes(self, prompt):
        rate = (0.05, 0.95)[int(prompt[1:]) // 200 % 2]
        return random.Random(f"passes:{prompt}").random() < rate


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_slow_prompts_are_trained_on_as_often_as_they_are_drawn(ahead):
    """Dropping groups that grew older than `max_staleness`, without pacing, loses 37 of 997 good groups here, 5 of them
    slow: acceptance rises faster than its estimate, and the fast ones among the many groups started are finished and
    dropped. 51.9 % of those trained on are then slow, and 50.2 % of those drawn."""
    world = FastAndSlow(0, 4)
    fills = run_of(world, 64, 120, 8, max_staleness=1, ahead=ahead)
    trained = [world.is_slow(group.prompt.id) for fill in fills for group in fill.kept]
    drawn = [world.is_slow(group.prompt.id) for fill in fills for group in fill.sampled]
    error = (0.25 / len(trained) + 0.25 / len(drawn)) ** 0.5
    assert len(trained) >= 960
    assert np.mean(trained) == pytest.approx(np.mean(drawn), abs=2 * error)
    assert np.mean(trained) == pytest.approx(0.5, abs=2 * (0.25 / len(trained)) ** 0.5)
    kept = [group.prompt.id for fill in fills for group in fill.kept]
    assert kept == [f"p{number}" for number in range(int(kept[-1][1:]) + 1) if world.passes(f"p{number}")]


class FirstTokenVerifier:
    def __call__(self, prompt, samples):
        right = [int(sample.token_ids[0]) % 4 == 0 for sample in samples]
        return [Verdict(float(r), r, "correct" if r else "wrong") for r in right]


PARAMS = SamplingParams(max_new_tokens=12)


def request(draw, prompt, version=0):
    return Request(f"draw-{draw}", prompt.token_ids, 4, PARAMS, derive_seed(0, prompt.id, draw))


def one_by_one(engine, prompts, n, next_draw):
    """The synchronous step: draws one group after the other until `n` of them are good."""
    kept = []
    while len(kept) < n:
        episodes = Episodes(engine, OneTurn(FirstTokenVerifier()), request)
        episodes.submitted = True
        flight = episodes.start(next_draw, prompts.draw())
        next_draw += 1
        while not flight.is_whole:
            episodes.poll()
        if len({verdict.correct for verdict in FirstTokenVerifier()(None, flight.samples)}) == 2:
            kept.append((flight.draw, flight.samples))
    return kept, next_draw


def test_without_staleness_the_run_is_the_synchronous_one():
    """The groups of each step are those of a loop that samples one group at a time and changes the weights after n good
    ones. `surplus: drop` has the same first step; later ones differ by the prompts that it dropped."""
    model, newer = small_model(), small_model(seed=5)

    def engine():
        return NativeEngine(copy.deepcopy(model), tokenizer(), max_batch=64)

    def sampler_for(engine, **changes):
        chosen = SamplingSettings(group_size=4, **changes)
        return Sampler(Prompts(), engine, FirstTokenVerifier(), PARAMS, chosen, cap=1000, seed=0)

    ours, alone, prompts, next_draw = engine(), engine(), Prompts(), 0
    sampler = sampler_for(ours, max_staleness=0)
    dropping = sampler_for(engine(), surplus="drop").fill(4)
    for version in (1, 2, 3):
        fill = sampler.fill(4)
        expected, next_draw = one_by_one(alone, prompts, 4, next_draw)
        assert (fill.in_flight, fill.carried_over, fill.tokens_cancelled) == (0, 0, 0)
        assert len(fill.sampled) == len(fill.kept) + len(fill.dropped)
        assert [group.draw for group in fill.kept] == [draw for draw, _ in expected]
        for group, (_, samples) in zip(fill.kept, expected, strict=True):
            for sample, other in zip(group.samples, samples, strict=True):
                assert np.array_equal(sample.token_ids, other.token_ids)
                assert set(sample.versions) == {version - 1}
                np.testing.assert_allclose(sample.logps, other.logps, rtol=0, atol=1e-4)
        if version == 1:
            assert [group.draw for group in dropping.kept] == [group.draw for group in fill.kept]
        for each in (ours, alone):
            each.receive(version, weights_of(newer if version % 2 else model))
    assert next_draw > 12, "some groups are dropped"
