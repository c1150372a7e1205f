"""Environments on the nodes of a Ray cluster."""

import os

import pytest
from patience import wait_until
from support import make_prompt

from dapo_rl.cluster.environments import DistributedEnvironments
from dapo_rl.config import EnvSettings
from dapo_rl.envs import AssistantTurn, Observation, Opening
from dapo_rl.envs.build import Factory
from dapo_rl.envs.guess import Guess
from dapo_rl.envs.protocol import EpisodeFailure
from dapo_rl.errors import UserError

pytestmark = pytest.mark.slow


class Where(Guess):
    """Says which pool started its process."""

    def open(self, prompt, seed):
        return f" {os.getppid()}"


class Here(Guess):
    """Says where it works."""

    def open(self, prompt, seed):
        return f" {os.getcwd()}"


class Broken(Factory):
    """Cannot be read on the nodes."""

    def __reduce__(self):
        return int, ("no number",)


class Refuses:
    def open(self, prompt, seed):
        raise UserError("env.name: it does not work here")


@pytest.fixture
def environments(ray_instance):
    made = []

    def make(kind, *, factory=Factory, restarts=0, notes=None, **options):
        settings, note = EnvSettings(name="guess", workers_per_node=2), ([] if notes is None else notes).append
        made.append(DistributedEnvironments(factory(kind, **options), settings, "x", restarts, note))
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


def test_environments_work_in_the_directory_of_the_driver(environments, tmp_path, monkeypatch):
    """Their options and commands may name files relative to it."""
    monkeypatch.chdir(tmp_path)
    _, opened = open_one(environments(Here))
    assert opened.messages[-1]["content"].endswith(f" {tmp_path}")


def test_a_mistake_of_the_user_is_raised(environments):
    pool = environments(Refuses)
    with pytest.raises(UserError, match="it does not work here"):
        pool.open(pool.new_key(), make_prompt("p"), seed=1).result(60)


def open_one(pool, seed=1):
    key = pool.new_key()
    return key, pool.open(key, make_prompt("p"), seed).result(60)


def kill_actors(pool):
    import ray

    killed = {each.actor for each in pool._nodes}
    for actor in killed:
        ray.kill(actor)
    # The client library learns of it a moment later.
    for actor in killed:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.close_episodes.remote([]), timeout=60)


def test_a_lost_actor_ends_its_episodes_and_starts_again(environments):
    notes = []
    pool = environments(Guess, restarts=1, notes=notes)
    key, opened = open_one(pool)
    assert isinstance(opened, Opening)
    kill_actors(pool)
    answer = pool.step(key, AssistantTurn("Answer: 0")).result(60)
    assert answer == EpisodeFailure("lost", "the actor of its node was ended by ray.kill")
    pool.close_episodes([key])
    key, opened = open_one(pool)
    assert isinstance(opened, Opening)
    assert pool.step(key, AssistantTurn("Answer: 9")).result(60) == Observation("9-=?")
    (note,) = notes
    assert note.endswith("were lost: the actor was ended by ray.kill; they start again")


def test_what_is_lost_is_not_the_environment_s_fault(environments):
    """`lost` episodes do not count for env.max_error_share, in an actor as in the local pool."""
    pool = environments(Guess)
    key, _ = open_one(pool)
    kill_actors(pool)
    _, opened = open_one(pool)  # the driver has not noticed yet
    assert [pool.step(key, AssistantTurn("")).result(60).reason, opened.reason] == ["lost", "lost"]


def test_with_no_actor_left_the_run_ends_in_one_line(environments):
    notes = []
    pool = environments(Guess, notes=notes)
    kill_actors(pool)
    assert open_one(pool)[1].reason == "lost"
    with pytest.raises(UserError) as raised:
        open_one(pool)
    line = str(raised.value)
    assert line.startswith(
        "env.workers_per_node: no node has environments left (cluster.restarts=0); the last actor was"
    )
    assert "Ray's logs" in line
    assert notes[0].endswith("they do not start again")


def test_an_actor_that_never_starts_says_why(environments):
    pool = environments(Guess, factory=Broken, restarts=1)
    assert [open_one(pool)[1].reason for _ in range(2)] == ["lost", "lost"]
    with pytest.raises(UserError, match=r"did not start: ValueError: invalid literal.*'no number'"):
        open_one(pool)


def test_the_other_nodes_take_over_and_a_new_one_gets_environments(environments, ray_instance, monkeypatch):
    monkeypatch.setattr("dapo_rl.cluster.environments.LOOK_S", 0.0)

    def nodes(pool):
        found = set()  # by their pools
        for _ in range(4):
            key, opened = open_one(pool)
            if isinstance(opened, Opening):
                found.add(opened.messages[-1]["content"].split()[-1])
            pool.close_episodes([key])
        return found

    second = ray_instance.add_node(num_cpus=2, object_store_memory=80 << 20)
    third = None
    try:
        pool = environments(Where, restarts=3)
        both = nodes(pool)
        assert len(both) == 2
        ray_instance.remove_node(second, allow_graceful=False)
        second = None
        wait_until(lambda: len(nodes(pool)) == 1)
        (left,) = nodes(pool)
        assert left in both
        third = ray_instance.add_node(num_cpus=2, object_store_memory=80 << 20)
        wait_until(lambda: len(nodes(pool)) == 2)
        assert nodes(pool) & both == {left}
    finally:
        for node in filter(None, (second, third)):
            ray_instance.remove_node(node)


def test_an_episode_that_was_given_up_is_lost(environments):
    pool = environments(Guess)
    key, _ = open_one(pool)
    pool.close_episodes([key])
    for call in (pool.step(key, AssistantTurn("Answer: 0")), pool.result(key)):
        assert call.result(60) == EpisodeFailure("lost", "the episode was given up")
