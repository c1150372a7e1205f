"""Length limits that grow within a run: which limit a group has, also across a boundary and a checkpoint."""

import pytest
from support import Prompts, ScriptedEngine, TextVerifier, make_prompt, make_sample

from dapo_rl.config import Config, SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.train.batch import shaped_rewards
from dapo_rl.types import Group, Verdict

STAGES = {0: 10, 2: 20, 3: 40}


def sampler_for(engine, stages=STAGES, **changes):
    settings = SamplingSettings(
        group_size=2, prompts_per_step=2, max_new_tokens=40, length_stages=stages, wait_for_verdicts=True, **changes
    )
    params = SamplingParams.of(settings)
    return Sampler(Prompts(), engine, TextVerifier(), params, settings, cap=1000, seed=0)


class Recording(ScriptedEngine):
    """Records the limit of every request and when it came; each group has a right and a wrong sample."""

    def __init__(self, width=10**6, submitted=None):
        super().__init__(lambda request: [make_sample(3, text="right"), make_sample(9, text="wrong")], width)
        self.submitted = {} if submitted is None else submitted

    def submit(self, request):
        self.submitted.setdefault(request.id, []).append((self.version, request.params.max_new_tokens))
        super().submit(request)


def test_the_limit_after_so_many_steps():
    settings = SamplingSettings(max_new_tokens=40, length_stages=STAGES)
    assert [settings.longest_response(steps) for steps in range(6)] == [10, 10, 20, 40, 40, 40]
    assert SamplingSettings(max_new_tokens=40).longest_response(7) == 40


@pytest.mark.parametrize("restored", [False, True])
def test_a_group_in_flight_keeps_the_limit_it_started_with(tmp_path, restored):
    """A narrow engine has groups in flight when the stage changes."""
    engine = Recording(width=3)
    sampler = sampler_for(engine, ahead=1.0)
    seen, crossed = set(), 0
    for step in range(6):
        engine.version = step
        if restored and step:
            sampler.save(tmp_path)
            engine = Recording(3, engine.submitted)
            engine.version = step
            sampler = sampler_for(engine, ahead=1.0)
            sampler.load(tmp_path)
        fill = sampler.fill(2)
        for group in fill.sampled:
            (limit,) = {sample.scalars["max_new_tokens"] for sample in group.samples}
            (begun, _), *_ = submissions = engine.submitted[f"draw-{group.draw}"]
            assert limit == {0: 10, 1: 10, 2: 20}.get(begun, 40)
            assert {submitted for _, submitted in submissions} == {limit}
            crossed += limit < {0: 10, 1: 10, 2: 20}.get(step, 40)
            seen.add(limit)
    assert seen == {10, 20, 40}
    assert crossed, "no group was in flight across a boundary"


def test_without_stages_nothing_is_recorded():
    engine = Recording()
    fill = sampler_for(engine, stages={}).fill(2)
    assert all("max_new_tokens" not in sample.scalars for group in fill.sampled for sample in group.samples)
    assert {limit for submissions in engine.submitted.values() for _, limit in submissions} == {40}


def test_the_penalty_follows_the_limit_of_the_group():
    """Eq. 13 with the default interval of a fifth: from 8 to 10 tokens of 10, and from 16 to 20 of 20."""
    right, wrong = Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong")

    def group(draw, limit):
        samples = tuple(make_sample(n).replace(scalars={"max_new_tokens": limit}) for n in (8, 9, 10, 18))
        return Group(draw, make_prompt(f"p{draw}"), samples, (right, wrong, right, right))

    settings = {"sampling.group_size": 4, "sampling.max_new_tokens": 20, "sampling.length_stages": {0: 10, 5: 20}}
    rewards = shaped_rewards([group(0, 10.0), group(1, 20.0)], Config.build(settings))
    assert rewards[0].tolist() == [1.0, -1.5, 0.0, 0.0]
    assert rewards[1].tolist() == [1.0, -1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["sampling.length_stages={5: 20}"], "no stage starts at step 0"),
        (["sampling.length_stages={0: 10, 5: 30}"], "the longest stage, 30, is not sampling.max_new_tokens 20"),
        (["sampling.length_stages={0: 10, 5: 20}", "env.name=guess"], "have one limit"),
        (["sampling.length_stages={0: 10, 5: 20}", "overlong.max_length=15"], "overlong.max_length: 15 is not reached"),
        (["sampling.length_stages={0: 10, 5: 20}", "overlong.cache_length=12"], "overlong.cache_length: 12 is not"),
        (["sampling.length_stages={0: 0, 5: 20}"], "length_stages"),
        (["sampling.length_stages={-1: 10, 0: 20}"], "length_stages"),
    ],
)
def test_mistakes(words, why):
    with pytest.raises(UserError, match=why):
        Config.load(None, ["sampling.max_new_tokens=20", *words])


def test_stages_are_the_same_after_a_round_trip_of_settings():
    words = ["sampling.max_new_tokens=20", "sampling.length_stages={0: 10, 5: 20}"]
    config = Config.load(None, words)
    assert config.sampling.length_stages == {0: 10, 5: 20}
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("more", [[], ["overlong.cache_length=3"], ["overlong.shape=linear", "overlong.max_length=8"]])
def test_the_settings_that_a_run_writes_give_the_same_run(more):
    """A run is resumed with them."""
    words = ["sampling.max_new_tokens=20", "sampling.length_stages={0: 10, 5: 20}", *more]
    config = Config.load(None, words)
    again = Config.build(config.resolved())
    assert again.resolved() == config.resolved()
    for longest in (10, 20):
        assert again.overlong_limits(longest) == config.overlong_limits(longest)
