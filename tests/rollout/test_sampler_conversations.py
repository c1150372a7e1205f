"""Dynamic sampling over episodes of several turns: the ledger adds up, and a seed gives the same batches, however long
the environment takes and whenever the run is stopped."""

import random
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Prompts, ScriptedEngine
from test_episodes import Letters

from dapo_rl.config import EnvSettings, SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.envs import Observation
from dapo_rl.envs.pool import EnvironmentPool
from dapo_rl.errors import StopRequested, UserError
from dapo_rl.rollout.conversation import Conversations
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Trajectory

pytestmark = pytest.mark.slow

STEPS = 3


class Game:
    """Find a number from 0 to 3. A step may take a while."""

    deterministic = True
    longest_s = 0.0

    def open(self, prompt, seed):
        self._dice = random.SystemRandom()
        self._wait()
        self._number = seed % 4

    def step(self, turn):
        self._wait()
        guess = int(turn.text[-1])
        if guess == self._number:
            return Observation(reward=0.5, done=True, correct=True)
        return Observation("more" if guess < self._number else "less", reward=-0.1)

    def result(self):
        self._wait()
        return -0.25

    def _wait(self):
        if self.longest_s:
            time.sleep(self._dice.choice([0, 0, 1]) * self._dice.uniform(0, self.longest_s))


class SlowGame(Game):
    longest_s = 0.02


class Forgetful(Game):
    deterministic = False


class Fragile(Game):
    def step(self, turn):
        if self._number == 1:
            raise RuntimeError("it is one")
        return super().step(turn)


POOLS = {}


@pytest.fixture(scope="module", autouse=True)
def pools():
    for kind in (Game, SlowGame, Forgetful, Fragile):
        POOLS[kind] = EnvironmentPool(kind, EnvSettings(name="x:y", workers=4))
    yield
    for pool in POOLS.values():
        assert pool.open_episodes == 0
        pool.close()


def turns(request):
    """Turns of several tokens; the last one is the guess. They depend on the seed alone."""
    samples = {}
    for begun in (*request.partial, *map(Trajectory.nothing, request.starting)):
        start = begun.turns[-1].end if begun.turns else 0
        dice = random.Random(f"{request.seed}:{begun.index}:{start}")
        tokens = [*[7] * dice.randint(0, 6), dice.randint(0, 3)][len(begun.token_ids) - start :]
        sample = begun.then(tokens, [-0.5] * len(tokens), 0)
        samples[begun.index] = sample.replace(text="", finish_reason="stop")
    return samples


def sampler_of(kind, prompts, engine, **options):
    env = EnvSettings(name="x:y", max_turns=3, max_error_share=options.pop("max_error_share", 1.0))
    own = SamplingSettings(prompts_per_step=3, group_size=4, max_new_tokens=60, **options)
    conversations = Conversations(POOLS[kind], Letters(), env, max_new_tokens=60, context=200)
    return Sampler(prompts, engine, None, SamplingParams(60), own, cap=60, seed=5, conversations=conversations)


class StopAt:
    """Requests a stop the n-th time it is asked."""

    def __init__(self, n):
        self.n = n

    def __call__(self):
        self.n -= 1
        if self.n == 0:
            raise StopRequested


class Played:
    """Some steps; with `stops`, the run is stopped in them and goes on in a new sampler."""

    def __init__(self, kind, stops=(), directory=None, **options):
        prompts, engine = Prompts(), ScriptedEngine(turns, width=10)
        sampler = sampler_of(kind, prompts, engine, **options)
        self.batches, stops = [], list(stops)
        while len(self.batches) < STEPS:
            try:
                self.batches.append(sampler.fill(3, StopAt(stops.pop(0) if stops else 0)))
                engine.receive(engine.version + 1)
            except StopRequested:
                sampler.save(directory)
                self.check(sampler)
                sampler._episodes.remove(lambda flight: True)
                sampler = sampler_of(kind, prompts, engine, **options)
                sampler.load(directory)
        self.check(sampler)
        self.restarted = sum(batch.tokens_restarted for batch in self.batches)
        sampler._episodes.remove(lambda flight: True)
        assert POOLS[kind].open_episodes == 0

    def check(self, sampler):
        """Every token that was generated is in one place."""
        batches = [*self.batches, *([sampler.so_far] if sampler.so_far else [])]
        kept = sum(group.tokens for batch in batches for group in batch.kept)
        dropped = sum(group.tokens for batch in batches for group, _ in batch.dropped)
        lost = sum(batch.tokens_cancelled + batch.tokens_restarted for batch in batches)
        generated = sum(batch.tokens_generated for batch in batches)
        assert generated == kept + dropped + lost + sampler.carried_tokens

    @property
    def contents(self):
        """What does not depend on time."""
        return [
            (
                [contents(group) for group in batch.kept],
                [(contents(group), outcome) for group, outcome in batch.dropped],
                (batch.tokens_generated, batch.tokens_cancelled, batch.carried_over, batch.in_flight),
            )
            for batch in self.batches
        ]


def contents(group):
    samples = [
        (
            sample.token_ids.tolist(),
            sample.mask.tolist(),
            sample.prompt_ids.tolist(),
            [(turn.start, turn.end, turn.author, turn.reward) for turn in sample.turns],
            [dict(message) for message in sample.messages],
            sample.finish_reason,
            {name: value for name, value in sample.scalars.items() if name != "env_wait_s"},
        )
        for sample in group.samples
    ]
    return group.draw, group.prompt.id, samples, group.verdicts


MODES = [
    {"surplus": "drop"},
    {"surplus": "requeue"},
    {"surplus": "carry", "max_staleness": 1},
    {"surplus": "carry", "max_staleness": 2, "ahead": 1},
]


@cache
def undisturbed(**mode):
    return Played(Game, **mode).contents


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_seed_gives_the_same_batches_however_long_a_step_takes(mode):
    for _ in range(2):
        assert Played(SlowGame, **mode).contents == undisturbed(**mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_answers_that_are_read_when_they_are_ready_add_up(mode):
    Played(SlowGame, wait_for_verdicts=False, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@given(stops=st.lists(st.integers(1, 60), min_size=1, max_size=4))
@settings(max_examples=12)
def test_a_run_that_is_stopped_gives_the_same_batches(mode, stops, tmp_path_factory):
    played = Played(Game, stops, tmp_path_factory.mktemp("run"), **mode)
    assert played.restarted == 0
    assert played.contents == undisturbed(**mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_episodes_that_cannot_be_replayed_start_again(mode, tmp_path):
    restarted = [Played(Forgetful, [stop, stop], tmp_path, **mode).restarted for stop in range(2, 20, 4)]
    assert max(restarted) > 0


def test_a_batch_that_is_full_before_episodes_start_again_can_be_saved(tmp_path):
    """Its episodes of earlier steps are untouched, and no draws of this step."""
    prompts, engine = Prompts(), ScriptedEngine(turns, width=20)
    mode = {"surplus": "carry", "max_staleness": 2, "ahead": 1}
    sampler = sampler_of(Forgetful, prompts, engine, **mode)
    for step in range(5):
        batch = sampler.fill(3)
        if step == 4:
            assert batch.tokens_restarted
            sampler.take_back()
        engine.receive(engine.version + 1)
        sampler.save(tmp_path)
        sampler._episodes.remove(lambda flight: True)
        sampler = sampler_of(Forgetful, prompts, engine, **mode)
        sampler.load(tmp_path)
    assert [group.draw for group in sampler.fill(3).kept] == [group.draw for group in batch.kept]
    sampler._episodes.drain()
    sampler._episodes.remove(lambda flight: True)


def test_groups_with_a_failed_episode_are_dropped():
    played = Played(Fragile, surplus="drop")
    outcomes = {outcome for batch in played.batches for _, outcome in batch.dropped}
    assert "environment_error" in outcomes
    for batch in played.batches:
        for group in batch.kept:
            assert not any(sample.scalars.get("env_failed") for sample in group.samples)


def test_an_environment_that_fails_too_often_stops_the_run():
    sampler = sampler_of(Fragile, Prompts(), ScriptedEngine(turns), max_error_share=0.0)
    with pytest.raises(UserError) as error:
        [sampler.fill(3) for _ in range(5)]
    assert "\n" not in str(error.value)
    assert "more than env.max_error_share 0 allows; the first failure: error: environment raised RuntimeError" in str(
        error.value
    )
    sampler._episodes.drain()
    sampler._episodes.remove(lambda flight: True)
