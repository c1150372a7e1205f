"""Environments on the nodes of a Ray cluster."""

import pytest
from support import make_prompt

from dapo_rl.cluster.environments import DistributedEnvironments
from dapo_rl.config import EnvSettings
from dapo_rl.envs import AssistantTurn, Observation, Opening
from dapo_rl.envs.build import Factory
from dapo_rl.envs.guess import Guess
from dapo_rl.errors import UserError

pytestmark = pytest.mark.slow


class Refuses:
    def open(self, prompt, seed):
        raise UserError("env.name: it does not work here")


@pytest.fixture
def environments(ray_instance):
    made = []

    def make(kind, **options):
        made.append(
            DistributedEnvironments(Factory(kind, **options), EnvSettings(name="guess", workers_per_node=2), "x")
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_episodes_are_played_on_the_nodes(environments):
    pool = environments(Guess, most=1)
    assert pool.deterministic
    keys = [pool.new_key() for _ in range(4)]
    opened = [pool.open(key, make_prompt("p"), seed=1).result(60) for key in keys]
    assert all(isinstance(each, Opening) and each.messages[-1]["content"].endswith("0+=?\n") for each in opened)
    higher = pool.step(keys[0], AssistantTurn("Answer: 0")).result(60)
    assert higher == Observation("0+=?")
    found = pool.step(keys[1], AssistantTurn("Answer: 1")).result(60)
    assert (found.reward, found.done) == (1.0, True)
    pool.close_episodes(keys)
    assert pool.open_episodes == 0


def test_a_mistake_of_the_user_is_raised(environments):
    pool = environments(Refuses)
    with pytest.raises(UserError, match="it does not work here"):
        pool.open(pool.new_key(), make_prompt("p"), seed=1).result(60)
