"""Credit of turns: worked out by hand, against an oracle that sums over tokens one by one, and in a run."""

from dataclasses import replace

import numpy as np
import pytest
from support import make_prompt

from dapo_rl import Config
from dapo_rl.algo import reference
from dapo_rl.train.batch import make_batch, with_advantages
from dapo_rl.train.custom import build_advantages
from dapo_rl.train.gae import with_values
from dapo_rl.train.transforms import build_transforms
from dapo_rl.train.turns import turn_credits
from dapo_rl.types import Group, RewardPart, Trajectory, Turn, Verdict


def episode(rewards, sizes=None, said=2, index=0, finish="stop"):
    """A turn of the policy for each reward, with a message of the environment between them."""
    mask, turns = [], []
    for number, reward in enumerate(rewards):
        size = 2 if sizes is None else sizes[number]
        turns.append(Turn(len(mask), len(mask) + size, "policy", 0.0, reward))
        mask += [True] * size
        if number < len(rewards) - 1:
            turns.append(Turn(len(mask), len(mask) + said, "environment"))
            mask += [False] * said
    return Trajectory(range(5, 5 + len(mask)), -0.5, "", finish, mask=mask, turns=tuple(turns), index=index)


def verdict(score, *parts):
    return Verdict(score, score > 0.5, "correct" if score > 0.5 else "wrong", parts=parts)


def group_of(*episodes, draw=0):
    samples = tuple(episode(rewards, index=i) for i, rewards in enumerate(episodes))
    return Group(draw, make_prompt(f"p{draw}"), samples, tuple(verdict(sum(rewards)) for rewards in episodes))


def config(*words, **algo):
    return Config.build({"algo": {"normalize": "none", **algo}, "env": {"name": "guess"}, "overlong": {"shape": "off"}})


def advantages(groups, discount, settings=None):
    settings = settings or config()
    batch = make_batch(groups, settings)
    return [s["advantages"] for s in with_advantages(batch, build_advantages(settings.algo), discount).samples]


def test_by_hand():
    """γ = 1/2. Returns of the first episode: 1, and half of it before; of the second: 0.5, then nothing. The first
    turns are equal, the second ones differ from their mean by a half, and the third one has nothing to compare with."""
    first, second = advantages([group_of([0, 1], [0.5, 0, 0])], 0.5)
    assert first.tolist() == [0, 0, 0, 0, 0.5, 0.5]
    assert second.tolist() == [0, 0, 0, 0, -0.5, -0.5, 0, 0, 0, 0]


def test_returns_by_hand_with_a_verifier_and_a_weight():
    """2 × the environment's rewards, and 3 of the verifier with the last turn. γ = 1/2: 7; 2 + 3.5; 4 + 2.75."""
    parts = RewardPart("verifier", 3.0), RewardPart("environment", 5.0, 2.0)
    group = Group(0, make_prompt("p"), (episode([2, 1, 2]),), (verdict(13.0, *parts),))
    (turns,) = turn_credits(make_batch([group], config()).groups[0], 0.5)
    assert [credit.reward for credit in turns] == [4, 2, 7]
    assert [credit.returned for credit in turns] == [6.75, 5.5, 7]


def test_rounding_is_no_reward():
    """The last turns have none, whatever those before had, and a normalised advantage would show any difference."""
    group = group_of([100.3, 0.7, 0.0], [57.7, -3.3, 0.0], [8.9, 21.1, 0.0], [-33.1, 3.7, 0.0])
    found = advantages([group], 1.0, Config.build({"env": {"name": "guess"}, "overlong": {"shape": "off"}}))
    assert [row[-1] for row in found] == [0.0] * 4
    assert all(row[0] for row in found)


def test_without_discounting_a_reward_at_the_end_is_that_of_all_turns():
    groups = [group_of([0, 1], [0, 0], [0, 1])]
    by_turn, whole = advantages(groups, 1.0), advantages(groups, None)
    for sample, of_turns, of_episode in zip(groups[0].samples, by_turn, whole, strict=True):
        assert of_turns[sample.mask].tolist() == of_episode[sample.mask].tolist()
        assert not of_turns[~sample.mask].any()


def test_single_turns_have_the_advantages_that_they_had():
    samples = tuple(Trajectory((5, 6), -0.5, "", "stop", index=i) for i in range(3))
    group = Group(0, make_prompt("p"), samples, (verdict(1.0), verdict(0.0), verdict(0.25)))
    for settings in (config(), config(normalize="group")):
        assert [row.tolist() for row in advantages([group], 0.9, settings)] == [
            row.tolist() for row in advantages([group], None, settings)
        ]


def test_forks_are_turns_of_their_episode():
    """γ = 1/2. The first episode has a turn in a fork, then two; the second has one turn."""
    fork = episode([0.25], index=0)
    group = replace(group_of([0, 1], [0]), forks=(fork,))
    group = replace(group, verdicts=(verdict(1.25), verdict(0.0)))
    first, second, forked = advantages([group], 0.5)
    assert forked.tolist() == [0.25, 0.25]  # 0.25 + 0 + 1 / 4, less the mean of 0.5 and 0
    assert second.tolist() == [-0.25, -0.25]
    assert first.tolist() == [0] * 6


def oracle(groups, discount, normalize, ddof=1, eps=1e-6):
    """Advantages token by token: the turn of a token is found by counting, its return by a sum over all later turns."""
    result = []
    for group in groups:
        turns = [[t for t in sample.turns if t.author == "policy"] for sample in group.samples]
        returns = []
        for own, judged in zip(turns, group.verdicts, strict=True):
            rewards = [t.reward for t in own]
            rewards[-1] += judged.score - sum(rewards)
            returns.append(
                [
                    sum(discount ** (j - k) * reward for j, reward in enumerate(rewards) if j >= k)
                    for k in range(len(rewards))
                ]
            )
        for i, sample in enumerate(group.samples):
            row = []
            for place in range(len(sample.token_ids)):
                k = next((k for k, t in enumerate(turns[i]) if t.start <= place < t.end), None)
                if k is None:
                    row.append(0.0)
                    continue
                others = np.array([own[k] for own in returns if len(own) > k])
                spread = others.std(ddof=ddof) + eps if normalize == "group" and len(others) > 1 else 1.0
                same = len(others) < 2 or np.ptp(others) == 0
                row.append(0.0 if same else (returns[i][k] - others.mean()) / spread)
            result.append(np.array(row))
    return result


@pytest.mark.parametrize("normalize", ["none", "group"])
@pytest.mark.parametrize("discount", [0.0, 0.3, 0.9, 1.0])
def test_against_the_oracle(normalize, discount):
    rng = np.random.default_rng(int(discount * 10))
    groups = []
    for draw in range(5):
        samples, verdicts = [], []
        for index in range(4):
            rewards = rng.choice([0.0, 0.25, 0.5, 1.0], rng.integers(1, 5)).tolist()
            samples.append(episode(rewards, rng.integers(1, 4, len(rewards)).tolist(), rng.integers(1, 4), index))
            verdicts.append(verdict(sum(rewards) + rng.choice([-1.0, 0.0, 1.0])))
        groups.append(Group(draw, make_prompt(f"p{draw}"), tuple(samples), tuple(verdicts)))
    found = advantages(groups, discount, config(normalize=normalize))
    for row, expected in zip(found, oracle(groups, discount, normalize), strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-5)


def test_episodes_outside_the_baseline_have_none():
    """Those that a limit ended are not compared, as without turns."""
    overlong = {"shape": "off", "mask_truncated": True, "masked_in_baseline": False}
    settings = Config.build({"algo": {"normalize": "none"}, "env": {"name": "guess"}, "overlong": overlong})
    group = group_of([0, 1], [0, 0], [0, 0])
    cut = (*group.samples[:2], group.samples[2].replace(finish_reason="turns"))
    first, second, third = advantages([replace(group, samples=cut)], 1.0, settings)
    assert not third.any()
    assert first[0] == -second[0] == 0.5


def gae_config(discount, **critic):
    return Config.build(
        {
            "preset": "vapo",
            "env": {"name": "guess", "turn_discount": discount},
            "critic": {"lambda_policy": 0.5, **critic},
            "overlong": {"shape": "off"},
        }
    )


def constant_values(samples):
    return [np.linspace(0.1, 0.9, len(sample.token_ids), dtype=np.float32) for sample in samples]


def test_a_critic_s_targets_are_the_returns_of_turns():
    """With λ = 1 for the critic. The values of the environment's tokens do not matter."""
    settings = gae_config(0.5, whiten=False)
    batch = make_batch([group_of([0, 1], [0.5, 0, 0])], settings)
    batch = with_values(batch, settings, constant_values)
    first, second = (sample["returns"].round(6).tolist() for sample in batch.samples)
    assert first == [0.5, 0.5, 0, 0, 1, 1]
    assert second == [0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("discount", [None, 1.0, 0.7])
def test_gae_against_the_oracle(discount):
    settings = gae_config(discount, whiten=False)
    groups = [group_of([0, 1], [0.5, 0.25, 0]), group_of([0.5], [0, 0, 1], draw=1)]
    batch = make_batch(groups, settings)
    values = constant_values(batch.samples)
    for sample, own, of_values in zip(with_values(batch, settings, constant_values).samples, batch.samples, values,
                                      strict=True):  # fmt: skip
        rewards, gammas = np.zeros(len(own.token_ids)), np.ones(len(own.token_ids))
        turns = [turn for turn in own.turns if turn.author == "policy"]
        if discount is None:
            rewards[turns[-1].end - 1] = sum(turn.reward for turn in turns)
        else:
            for turn in turns:
                rewards[turn.end - 1], gammas[turn.end - 1] = turn.reward, discount
        expected = reference.gae([of_values], [rewards], [own.mask], 0.5, [gammas])[0]
        np.testing.assert_allclose(sample["advantages"], expected, atol=1e-6)


def test_a_fork_ends_with_what_follows_it():
    """γ = 1/2: the fork's only turn has 0.25, and half of 1 / 2 follows."""
    settings = gae_config(0.5, whiten=False)
    group = replace(group_of([0, 1], [0]), forks=(episode([0.25], index=0),))
    group = replace(group, verdicts=(verdict(1.25), verdict(0.0)))
    batch = with_values(make_batch([group], settings), settings, constant_values)
    assert [sample["returns"].round(6).tolist() for sample in batch.samples] == [
        [0.5, 0.5, 0, 0, 1, 1], [0, 0], [0.5, 0.5],
    ]  # fmt: skip


class NoScores:
    def score(self, samples):
        return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]

    score_reference = score_entropy = score


@pytest.mark.parametrize("discount", [None, 0.5])
def test_a_run_uses_the_setting(discount):
    settings = Config.build({"env": {"name": "guess", "turn_discount": discount}, "overlong": {"shape": "off"}})
    batch = make_batch([group_of([0, 1], [0.5, 0, 0])], settings)
    for transform in build_transforms(settings, NoScores(), build_advantages(settings.algo)):
        batch = transform(batch)
    constant = [len({*sample["advantages"].tolist()}) == 1 for sample in batch.samples]
    assert constant == [discount is None] * 2
