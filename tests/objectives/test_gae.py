"""Generalised advantage estimation: values worked out by hand, and what holds for any numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl import algo
from dapo_rl.algo import adaptive_lambda, decoupled_gae, gae, reference, token_rewards, whitened

QUICK = settings(max_examples=40, deadline=None)
VALUES = torch.tensor([[0.5, 0.25, 1.0, 0.0], [2.0, 7.0, 1.0, 9.0]])
REWARDS = torch.tensor([1.0, -1.0])
MASK = torch.tensor([[True, True, True, False], [True, False, True, False]])


def test_by_hand():
    """First row: δ = 0.25 − 0.5, 1 − 0.25, 1 − 1 = −0.25, 0.75, 0. With λ = 1/2: 0; 0.75; −0.25 + 0.375.

    Second row: the token with the value 7 is not the policy's, so δ = 1 − 2, −1 − 1 = −1, −2; then −2; −1 − 1.
    """
    expected = [[0.125, 0.75, 0.0, 0.0], [-2.0, 0.0, -2.0, 0.0]]
    assert gae(VALUES, REWARDS, MASK, 0.5).tolist() == expected
    assert reference.gae(VALUES, REWARDS, MASK, 0.5).tolist() == expected


def test_by_hand_with_a_discount_and_a_reward_at_each_token():
    """γ = 1/2, λ = 1/2, r = 1, 0, 2: δ = 1 + 0.125 − 0.5, 0.5 − 0.25, 2 − 1 = 0.625, 0.25, 1; then 1; 0.5; 0.75."""
    rewards = torch.tensor([[1.0, 0.0, 2.0]])
    arrays = VALUES[:1, :3], rewards, MASK[:1, :3]
    assert gae(*arrays, 0.5, gamma=0.5).tolist() == [[0.75, 0.5, 1.0]]
    assert reference.gae(*arrays, 0.5, gamma=0.5).tolist() == [[0.75, 0.5, 1.0]]


def test_the_critic_and_the_policy_have_their_own_lambda():
    policy, targets = decoupled_gae(VALUES, REWARDS, MASK, policy_lambda=0.5)
    assert policy.tolist() == [[0.125, 0.75, 0.0, 0.0], [-2.0, 0.0, -2.0, 0.0]]
    assert targets.tolist() == [[1.0, 1.0, 1.0, 0.0], [-1.0, 0.0, -1.0, 0.0]]  # λ = 1: the reward
    _, of_ppo = decoupled_gae(VALUES, REWARDS, MASK, policy_lambda=0.5, critic_lambda=0.5)
    assert of_ppo.tolist() == [[0.625, 1.0, 1.0, 0.0], [0.0, 0.0, -1.0, 0.0]]


def test_lambda_adapts_to_the_length():
    """α = 0.05: 1 − 1 / (0.05 · 40) = 0.5, 1 − 1 / 5 = 0.8, 1 − 1 / 1000 = 0.999; up to 20 tokens it is 0."""
    lengths = torch.tensor([40, 100, 20_000, 20, 5])
    assert adaptive_lambda(lengths).tolist() == pytest.approx([0.5, 0.8, 0.999, 0.0, 0.0], abs=1e-6)
    assert adaptive_lambda(lengths, lowest=0.9).tolist() == pytest.approx([0.9, 0.9, 0.999, 0.9, 0.9])
    assert adaptive_lambda(lengths, alpha=1).tolist()[0] == pytest.approx(1 - 1 / 40)
    np.testing.assert_allclose(adaptive_lambda(lengths), reference.adaptive_lambda(lengths), atol=1e-6)
    each = torch.tensor([0.5, 0.0])
    assert gae(VALUES, REWARDS, MASK, each).tolist() == [[0.125, 0.75, 0.0, 0.0], [-1.0, 0.0, -2.0, 0.0]]


def test_the_reward_is_at_the_last_token_and_the_kl_penalty_at_each():
    kl = torch.tensor([[1.0, 2.0, 3.0, torch.nan], [0.0, torch.nan, -1.0, torch.nan]])
    plain = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, -1.0, 0.0]]
    with_kl = [[-0.5, -1.0, -0.5, 0.0], [0.0, 0.0, -0.5, 0.0]]
    for library in (algo, reference):
        assert library.token_rewards(REWARDS, MASK).tolist() == plain
        assert library.token_rewards(REWARDS, MASK, kl, 0.5).tolist() == with_kl
    assert gae(VALUES, token_rewards(REWARDS, MASK), MASK, 0.5).tolist() == gae(VALUES, REWARDS, MASK, 0.5).tolist()


def test_whitening_by_hand():
    """1, 2, 3 have the mean 2 and the variance 1; the 9 is masked."""
    advantages, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    np.testing.assert_allclose(whitened(advantages, mask), [[-1, 0], [1, 0]], atol=1e-6)
    np.testing.assert_allclose(reference.whitened(advantages, mask), [[-1, 0], [1, 0]], atol=1e-6)
    assert whitened(advantages, torch.zeros_like(mask)).tolist() == [[0, 0], [0, 0]]


@st.composite
def batches(draw):
    samples, width = draw(st.integers(1, 5)), draw(st.integers(1, 33))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random((samples, width)) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return {
        "values": torch.tensor(rng.normal(0, 1, (samples, width)), dtype=torch.float32),
        "rewards": torch.tensor(rng.normal(0, 1, samples), dtype=torch.float32),
        "mask": torch.tensor(mask),
    }


def assert_near(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@QUICK
@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_torch_equals_numpy(batch, lambda_, gamma):
    arrays = batch.values()
    assert_near(gae(*arrays, lambda_, gamma), reference.gae(*arrays, lambda_, gamma))
    each = torch.linspace(0, lambda_, len(batch["rewards"]))
    ours, theirs = (
        library.decoupled_gae(*arrays, policy_lambda=each, critic_lambda=lambda_, gamma=gamma)
        for library in (algo, reference)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert_near(one, other)
    if batch["mask"].any():
        assert_near(whitened(batch["values"], batch["mask"]), reference.whitened(batch["values"], batch["mask"]))


@QUICK
@given(batches())
def test_lambda_1_is_the_return_less_the_value_and_lambda_0_the_error_of_one_step(batch):
    values, rewards, mask = batch.values()
    assert_near(gae(values, rewards, mask, 1.0), torch.where(mask, rewards[:, None] - values, 0.0))
    one_step = gae(values, rewards, mask, 0.0)
    for i in range(len(values)):
        of_written = values[i][mask[i]].tolist()
        nexts = [*of_written[1:], rewards[i].item()]
        assert_near(one_step[i][mask[i]], [after - v for v, after in zip(of_written, nexts, strict=False)])


@QUICK
@given(batches(), st.floats(0, 1), st.randoms(use_true_random=False))
def test_splitting_padding_packing_and_the_order_of_samples_change_nothing(batch, lambda_, random):
    values, rewards, mask = batch.values()
    together = gae(values, rewards, mask, lambda_)
    for i in range(len(values)):
        alone = gae(values[i : i + 1], rewards[i : i + 1], mask[i : i + 1], lambda_)
        assert_near(alone[0], together[i])
        written = mask[i]
        packed = gae(values[i][None, written], rewards[i : i + 1], torch.ones(1, int(written.sum())).bool(), lambda_)
        assert_near(packed[0], together[i][written])
    wider = torch.nn.functional.pad(values, (3, 5), value=torch.nan), torch.nn.functional.pad(mask, (3, 5))
    assert_near(gae(wider[0], rewards, wider[1], lambda_)[:, 3:-5], together)
    order = random.sample(range(len(values)), len(values))
    assert_near(gae(values[order], rewards[order], mask[order], lambda_), together[order])


@QUICK
@given(batches(), st.floats(0, 1), st.integers(0, 32))
def test_a_perfect_critic_gives_no_advantage_after_the_deciding_token(batch, lambda_, deciding):
    """Up to the deciding token the critic expects the mean of both outcomes, after it the outcome."""
    _, rewards, mask = batch.values()
    before = (torch.arange(mask.shape[1]) <= deciding).expand_as(mask)
    advantages = gae(torch.where(before, 0.0, rewards[:, None]), rewards, mask, lambda_)
    assert_near(advantages[~before], torch.zeros(int((~before).sum())))
    for i in range(len(mask)):
        if (decided := (mask[i] & before[i]).nonzero()).numel():
            assert advantages[i, decided[-1, 0]] == pytest.approx(rewards[i].item(), abs=1e-5)


def test_long_responses_lose_no_precision():
    values = torch.linspace(-1, 1, 20_000)[None]
    mask = torch.ones_like(values, dtype=torch.bool)
    advantages = gae(values, torch.ones(1), mask, 1.0)
    np.testing.assert_allclose(advantages, 1 - values, atol=2e-6)
    short = slice(19_000, None)  # 0.999^1000 is 0.37, so that the whole tail counts
    np.testing.assert_allclose(
        gae(values, torch.ones(1), mask, 0.999)[:, short],
        reference.gae(values[:, short], np.ones(1), mask[:, short], 0.999),
        rtol=1e-4,
    )


def test_a_sample_without_tokens_of_the_policy_has_no_advantage():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    estimates = decoupled_gae(torch.full((1, 3), torch.nan), torch.ones(1), nothing, policy_lambda=0.95)
    assert estimates.advantages.tolist() == estimates.targets.tolist() == [[0, 0, 0]]
