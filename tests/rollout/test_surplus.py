"""What a full batch leaves over: the speed of a prompt does not decide how often it is trained on."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from support import Prompts, ScriptedEngine, TextVerifier, make_sample

from dapo_rl.config import SamplingSettings
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.lab.simulated_engine import SimulatedEngine
from dapo_rl.lab.simulated_world import EndlessPrompts, World
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.types import Verdict


@dataclass(frozen=True)
class FastAndSlow(World):
    """Half of the prompts take 100 times as long as the others: one of each pair of neighbours."""

    def is_slow(self, prompt):
        return int(prompt[1:]) % 4 in (1, 2)

    def lengths(self, prompt):
        return (100 if self.is_slow(prompt) else 1,) * self.group


class CountedPrompts(EndlessPrompts):
    def __init__(self):
        super().__init__()
        self.times = Counter()

    def draw(self):
        prompt = super().draw()
        self.times[prompt.id] += 1
        return prompt


class Coin:
    """A group passes with probability 0.2, anew each time that its prompt is drawn. Neighbours have the same luck."""

    def __init__(self, prompts):
        self._prompts = prompts

    def __call__(self, prompt, samples):
        times = self._prompts.times[prompt.id]
        good = random.Random(f"{int(prompt.id[1:]) // 2}:{times}").random() < 0.2
        return [Verdict(1.0, True, "") if good and i == 0 else Verdict(-1.0, False, "") for i in range(len(samples))]


@pytest.mark.slow
@pytest.mark.parametrize("surplus", ["carry", "requeue", "drop"])
def test_slow_prompts_are_trained_on_as_often_as_fast_ones(surplus):
    """If only unfinished groups are drawn again, 54.8 % are slow; 52.8 % if finished good ones are, too."""
    world = FastAndSlow(0, 2)
    engine = SimulatedEngine.counting_steps(world, 24)
    settings = SamplingSettings(group_size=2, prompts_per_step=8, surplus=surplus)
    prompts = CountedPrompts()
    sampler = Sampler(prompts, engine, Coin(prompts), SamplingParams(4096), settings, cap=10**6, seed=0)
    slow = []
    for version in range(100):
        slow += [world.is_slow(group.prompt.id) for group in sampler.fill(8).kept]
        engine.receive(version + 1, None)
    assert np.mean(slow) == pytest.approx(0.5, abs=0.015)


def leftovers(surplus):
    """By the first guess of the acceptance rate, fifteen groups are started for twelve. These pass; then one is
    finished and good, one finished and all wrong, and one has begun."""
    prompts, mixed = Prompts(), ["right", "wrong", "wrong", "wrong"]

    def script(request):
        n = int(request.id.removeprefix("draw-"))
        return [make_sample(90 if n == 14 else 3, text=t) for t in (["wrong"] * 4 if n == 13 else mixed)]

    settings = SamplingSettings(group_size=4, surplus=surplus)
    sampler = Sampler(prompts, ScriptedEngine(script), TextVerifier(), SamplingParams(100), settings, cap=50, seed=0)
    fill = sampler.fill(12)
    assert [group.draw for group in fill.kept] == list(range(12))
    assert [(group.draw, outcome) for group, outcome in fill.dropped] == [(12, "surplus"), (13, "all_wrong")]
    assert fill.tokens_cancelled > 0
    prompts.drawn.clear()
    sampler.fill(12)
    return prompts.drawn[:3]


def test_dropped_surplus_is_not_drawn_again_whether_it_has_finished_or_not():
    assert leftovers("drop") == ["p15", "p16", "p17"]


def test_requeued_surplus_is_drawn_again_in_its_order_whether_it_has_finished_or_not():
    assert leftovers("requeue") == ["p12", "p13", "p14"]
