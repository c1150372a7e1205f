"""Log-ratios of any size: bounded at 20 where they are exponentiated, with a finite loss and gradient everywhere."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import clip_fractions, dapo_policy_loss, kl_penalty, reference
from dapo_rl.choices import KL_KINDS

QUICK = settings(max_examples=60, deadline=None)
E20 = math.exp(20)
BEYOND = [20.5, 88.0, 89.0, 1000.0, 1e4]


def loss_and_gradient(log_ratio, advantage, **options):
    new = torch.tensor([log_ratio], requires_grad=True)
    loss = dapo_policy_loss(new, torch.zeros(1), torch.tensor([advantage]), **options)
    loss.backward()
    return loss.item(), new.grad.item()


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize(
    ("sign", "advantage", "options", "expected"),
    [
        (1, 1.0, {}, -1.28),  # clipped: min(e²⁰, 1.28)
        (1, -1.0, {}, E20),  # no bound on this side: max(e²⁰, 0.8)
        (1, -1.0, {"clip_ratio_c": 3.0}, 3.0),
        (-1, 1.0, {}, -1 / E20),
        (-1, -1.0, {}, 0.8),  # clipped: max(e⁻²⁰, 0.8)
        (1, 0.0, {}, 0.0),
    ],
)
def test_beyond_the_bound_by_hand(beyond, sign, advantage, options, expected):
    loss, gradient = loss_and_gradient(sign * beyond, advantage, **options)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradient == 0
    numpy = reference.dapo_policy_loss([sign * beyond], [0.0], [advantage], **options)
    assert numpy == pytest.approx(expected, rel=1e-12)


def test_at_the_bound_the_gradient_is_the_ratios():
    assert loss_and_gradient(20.0, -1.0) == pytest.approx((E20, E20), rel=1e-6)
    assert loss_and_gradient(-20.0, 1.0) == pytest.approx((-1 / E20, -1 / E20), rel=1e-6)


def test_one_token_beyond_leaves_the_gradient_of_the_others():
    new = torch.tensor([100.0, math.log(1.1)], requires_grad=True)
    dapo_policy_loss(new, torch.zeros(2), torch.ones(2)).backward()
    assert new.grad.tolist() == pytest.approx([0.0, -1.1 / 2])


@pytest.mark.parametrize("beyond", BEYOND)
def test_clip_fractions_beyond_the_bound(beyond):
    new, advantages = [beyond, -beyond, beyond, -beyond], [1.0, -1.0, -1.0, 1.0]
    ours = clip_fractions(torch.tensor(new), torch.zeros(4), torch.tensor(advantages), clip_ratio_c=3.0)
    theirs = reference.clip_fractions(new, np.zeros(4), advantages, clip_ratio_c=3.0)
    assert tuple(ours) == tuple(theirs) == (0.25, 0.25, 0.25)
    # A bound above e²⁰ would need a ratio that the loss never sees.
    never = clip_fractions(torch.tensor(new), torch.zeros(4), torch.tensor(advantages), clip_ratio_c=1e9)
    assert never.dual == reference.clip_fractions(new, np.zeros(4), advantages, clip_ratio_c=1e9).dual == 0


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [
        (0.0, 0.0, 0.0),
        (5.0, math.exp(5) - 6, 1 - math.exp(5)),
        (20.0, E20 - 21, 1 - E20),
        (20.5, E20 - 21, 0.0),
        (1e4, E20 - 21, 0.0),
        # Where the policy is the likelier one, k3 is nearly a line: the further, the more it costs.
        (-5.0, math.exp(-5) + 4, 1 - math.exp(-5)),
        (-20.5, 19.5, 1.0),
        (-1e4, 9999.0, 1.0),
    ],
)
def test_k3_by_hand(difference, value, gradient):
    """`difference` is log(reference / policy); the gradient is by the policy's log-probability."""
    logps = torch.tensor([0.0], requires_grad=True)
    estimate = kl_penalty(logps, torch.tensor([difference]))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert logps.grad.item() == pytest.approx(gradient, rel=1e-6, abs=1e-6)
    assert reference.kl_penalty([0.0], [difference])[0] == pytest.approx(value, rel=1e-9)


log_ratios = st.lists(st.floats(-1e4, 1e4, width=32) | st.floats(-25, 25, width=32), min_size=1, max_size=12)
advantages = st.floats(-3, 3, width=32)


@QUICK
@given(log_ratios, advantages, st.sampled_from([None, 3.0]))
def test_loss_and_gradient_are_finite_and_torch_equals_numpy(values, advantage, clip_ratio_c):
    new = torch.tensor(values, requires_grad=True)
    arrays = np.array(values), np.zeros(len(values)), np.full(len(values), advantage)
    tensors = new, torch.zeros(len(values)), torch.full((len(values),), advantage)
    loss = dapo_policy_loss(*tensors, clip_ratio_c=clip_ratio_c)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert loss.item() == pytest.approx(
        reference.dapo_policy_loss(*arrays, clip_ratio_c=clip_ratio_c), rel=1e-4, abs=1e-6
    )
    ours = clip_fractions(*tensors, clip_ratio_c=clip_ratio_c)
    assert [f.item() for f in ours] == pytest.approx(reference.clip_fractions(*arrays, clip_ratio_c=clip_ratio_c))


@QUICK
@given(log_ratios, st.sampled_from(list(KL_KINDS)))
def test_kl_and_its_gradient_are_finite_and_torch_equals_numpy(values, kind):
    logps = torch.tensor(values, requires_grad=True)
    estimate = kl_penalty(logps, torch.zeros(len(values)), kind)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(logps.grad).all()
    theirs = reference.kl_penalty(np.array(values), np.zeros(len(values)), kind)
    np.testing.assert_allclose(estimate.detach(), theirs, rtol=1e-5, atol=1e-5)
    if kind.startswith("k3"):
        assert (estimate >= 0).all()


@QUICK
@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12), st.floats(-3, 3, width=32))
def test_within_the_bound_nothing_changes_bit_for_bit(values, advantage):
    new = torch.tensor(values, requires_grad=True)
    same = torch.tensor(values, requires_grad=True)
    count = len(values)
    loss = dapo_policy_loss(new, torch.zeros(count), torch.full((count,), advantage))
    ratio, each = torch.exp(same - torch.zeros(count)), torch.full((count,), advantage)
    unbounded = -torch.minimum(ratio * each, ratio.clamp(1 - 0.2, 1 + 0.28) * each)
    plain = unbounded.sum() / torch.tensor(count)
    loss.backward()
    plain.backward()
    assert torch.equal(loss, plain)
    assert torch.equal(new.grad, same.grad)
    exact = torch.expm1(new.double()) - new.double()
    assert torch.equal(kl_penalty(torch.zeros(count), new), exact.float())


def test_what_is_not_a_number_stays_so():
    """The update stops at it; a bound must not turn it into a number."""
    nan = torch.tensor([math.nan])
    assert dapo_policy_loss(nan, torch.zeros(1), torch.ones(1)).isnan()
    assert kl_penalty(nan, torch.zeros(1)).isnan().all()
