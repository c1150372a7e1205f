"""With truncated samples masked, a group is kept if the samples that are left give a gradient."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Prompts, ScriptedEngine, TextVerifier, full_batch, make_prompt, make_sample

from dapo_rl.config import Config
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.rollout.dynamic_sampling import Grading, outcome_of
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Group, Verdict

MASKED = {"overlong.mask_truncated": True, "overlong.shape": "off"}


def config_of(**changes):
    return Config.build({"sampling.group_size": 4, **MASKED, **changes})


def group_of(samples):
    """One sample for each letter: right or wrong, in upper case if it was cut off."""
    made = tuple(make_sample(3, "length" if letter.isupper() else "stop") for letter in samples)
    right = [letter in "rR" for letter in samples]
    return Group(0, make_prompt("p"), made, tuple(Verdict(1.0 if r else -1.0, r, "") for r in right))


def outcome(samples, config):
    return outcome_of(group_of(samples), config.sampling, None, Grading(), config.masking)


@pytest.mark.parametrize(
    ("samples", "in_baseline", "apart"),
    [
        ("rrww", "kept", "kept"),
        ("rwWW", "kept", "kept"),
        ("rrrr", "all_correct", "all_correct"),
        ("WWWW", "all_wrong", "all_wrong"),
        ("rrWW", "kept", "truncated"),  # beside the truncated ones, the others are better; by themselves they are equal
        ("wRRR", "kept", "truncated"),
        ("RRWW", "truncated", "truncated"),  # nothing is left
    ],
)
def test_by_hand(samples, in_baseline, apart):
    assert outcome(samples, config_of()) == in_baseline
    without = config_of(**{"overlong.masked_in_baseline": False})
    assert outcome(samples, without) == apart
    assert outcome(samples, config_of(**{"overlong.mask_truncated": False})) in ("kept", "all_correct", "all_wrong")
    # The advantages of a critic do not compare samples: what is left learns.
    critic = config_of(**{"overlong.masked_in_baseline": False, "algo.advantage": "gae"})
    assert outcome(samples, critic) == in_baseline
    unfiltered = config_of(**{"overlong.masked_in_baseline": False, "sampling.dynamic": False})
    assert outcome(samples, unfiltered) == "kept"


@settings(max_examples=200, deadline=None)
@given(
    samples=st.text("rwRW", min_size=4, max_size=4),
    masks=st.booleans(),
    in_baseline=st.booleans(),
    advantage=st.sampled_from(["group", "opo"]),
)
def test_a_group_is_kept_if_and_only_if_it_has_a_gradient(samples, masks, in_baseline, advantage):
    config = config_of(
        **{
            "overlong.mask_truncated": masks,
            "overlong.masked_in_baseline": in_baseline,
            "algo.advantage": advantage,
        }
    )
    (trained,) = full_batch([group_of(samples)], config)
    learns = any(sample.loss_mask.any() and sample["advantages"].any() for sample in trained.samples)
    assert (outcome(samples, config) == "kept") == learns


def test_the_sampler_replaces_a_group_of_which_nothing_is_left_to_prefer():
    """The first group has two right samples and two that were cut off; the second is right and wrong."""

    def script(request):
        cut = request.id == "draw-0"
        kinds = [("right", "stop"), ("right", "stop"), *[("wrong", "length" if cut else "stop")] * 2]
        return [make_sample(3, reason, text=text) for text, reason in kinds]

    config = config_of(**{"overlong.masked_in_baseline": False, "sampling.surplus": "drop"})
    sampler = Sampler(
        *(Prompts(), ScriptedEngine(script), TextVerifier(), SamplingParams(100), config.sampling),
        **{"cap": 50, "seed": 0, "masking": config.masking},
    )
    fill = sampler.fill(2)
    assert [group.draw for group in fill.kept] == [1, 2]
    assert (fill.dropped[0][0].draw, fill.dropped[0][1]) == (0, "truncated")


def test_a_prompt_whose_left_samples_are_right_does_not_rest():
    """Its truncated samples are wrong."""
    prompts = Prompts()

    def script(request):
        kinds = [("right", "stop")] * 3 + [("wrong", "length" if request.id == "draw-0" else "stop")]
        return [make_sample(3, reason, text=text) for text, reason in kinds]

    config = config_of(**{"overlong.masked_in_baseline": False, "sampling.skip_solved_epochs": 3})
    arguments = (prompts, ScriptedEngine(script), TextVerifier(), SamplingParams(100), config.sampling)
    Sampler(*arguments, cap=50, seed=0, masking=config.masking).fill(2)
    assert prompts.resting == []
