"""Estimators of the KL divergence: their gradients in expectation, and their precision where policies hardly differ."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import kl_penalty, reference
from dapo_rl.choices import KL_KINDS
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.objectives.kl import unbiased_kl

QUICK = settings(max_examples=30, deadline=None)
LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.7, 0.5, 0.2, 1.1, -0.3], dtype=torch.float64), -1)


def in_expectation(kind):
    """The gradient, by the logits, of the estimate of a token that the policy samples: the sampling has none."""
    logits = LOGITS.clone().requires_grad_()
    logps = torch.log_softmax(logits, -1)
    (logps.exp().detach() * kl_penalty(logps, REFERENCE, kind)).sum().backward()
    return logits.grad


def of_divergence(*, forward):
    """The exact gradient of KL(policy ‖ reference), or of KL(reference ‖ policy)."""
    logits = LOGITS.clone().requires_grad_()
    logps = torch.log_softmax(logits, -1)
    terms = logps.exp() * (logps - REFERENCE) if forward else REFERENCE.exp() * (REFERENCE - logps)
    terms.sum().backward()
    return logits.grad


def test_which_estimators_have_the_gradient_of_the_divergence():
    wanted = of_divergence(forward=True)
    assert wanted.norm() > 0.3
    assert in_expectation("k1").norm() < 1e-6
    for kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(in_expectation(kind), wanted, atol=1e-6, rtol=0)
    reverse = of_divergence(forward=False)
    torch.testing.assert_close(in_expectation("k3"), reverse, atol=1e-6, rtol=0)
    assert torch.cosine_similarity(reverse, wanted, dim=0) < 0.99
    assert {kind for kind, choice in KL_KINDS.items() if not choice.learns} == {"k1"}


@pytest.mark.parametrize("kind", KL_KINDS)
@QUICK
@given(log_ratios=st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=12))
def test_value_and_slope_equal_numpy(kind, log_ratios):
    logps = torch.tensor(log_ratios, requires_grad=True)
    ref = torch.zeros(len(log_ratios))
    estimate = kl_penalty(logps, ref, kind)
    estimate.sum().backward()
    np.testing.assert_allclose(estimate.detach(), reference.kl_penalty(log_ratios, ref, kind), rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose(logps.grad, reference.kl_slope(log_ratios, ref, kind), rtol=1e-6, atol=1e-15)
    assert torch.equal(estimate, kl_penalty(logps, ref, kind.removesuffix("+")))


OLDER = torch.log_softmax(torch.tensor([0.1, -0.2, 0.4, 0.9, -0.6], dtype=torch.float64), -1)
"""A policy that sampled, and that is not the one trained."""


def unbiased_in_expectation(kind, sampler):
    """The gradient of the weighted estimate of a token that `sampler` samples; the value is the expectation too."""
    logits = LOGITS.clone().requires_grad_()
    logps = torch.log_softmax(logits, -1)
    value = (sampler.exp() * unbiased_kl(logps, REFERENCE, sampler, kind)).sum()
    value.backward()
    return value.item(), logits.grad


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("sampler", [torch.log_softmax(LOGITS, -1), OLDER], ids=["the policy", "an older one"])
def test_the_weighted_estimate_is_unbiased_in_value_and_gradient(kind, sampler):
    value, gradient = unbiased_in_expectation(kind, sampler)
    policy = torch.log_softmax(LOGITS, -1)
    assert value == pytest.approx((policy.exp() * (policy - REFERENCE)).sum().item(), rel=1e-6)
    torch.testing.assert_close(gradient, of_divergence(forward=True), atol=1e-6, rtol=0)
    assert KL_KINDS[kind].unbiased


def test_other_estimators_are_not_unbiased_if_weighted():
    """Their own gradient is already that of the divergence, or their value is not."""
    for kind in ("k2", "k1+", "k3+"):
        _, gradient = unbiased_in_expectation(kind, torch.log_softmax(LOGITS, -1))
        assert (gradient - of_divergence(forward=True)).norm() > 0.05
        assert not KL_KINDS[kind].unbiased
        with pytest.raises(
            UserError, match=rf"^algo\.kl_unbiased: with algo\.kl_kind={kind[:2]}.*set algo\.kl_kind=k3"
        ):
            Config.build({"algo.kl_coef": 0.1, "algo.kl_kind": kind, "algo.kl_unbiased": True})


def test_the_weighted_estimate_by_hand():
    """π = 0.5, π_ref = 0.25, sampled with 0.25: the ratio is 2. k3 is 0.5 − 1 − log 0.5 = 0.193147, so the estimate is
    0.386294; its slope is 2 · (0.193147 + 1 − 0.5), twice log(π / π_ref)."""
    logps = torch.tensor([math.log(0.5)], requires_grad=True)
    quarter = torch.tensor([math.log(0.25)])
    estimate = unbiased_kl(logps, quarter, quarter)
    estimate.backward()
    assert estimate.item() == pytest.approx(0.3862944, rel=1e-6)
    assert logps.grad.item() == pytest.approx(2 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
@QUICK
@given(log_ratios=st.lists(st.floats(-25, 25, width=32), min_size=1, max_size=12), seed=st.integers(0, 2**20))
def test_the_weighted_estimate_equals_numpy_in_value_and_slope(kind, log_ratios, seed):
    older = np.random.default_rng(seed).normal(0, 9, len(log_ratios)).astype(np.float32)
    logps, ref = torch.tensor(log_ratios, requires_grad=True), torch.zeros(len(log_ratios))
    estimate = unbiased_kl(logps, ref, torch.tensor(older), kind)
    estimate.sum().backward()
    given_to_both = (log_ratios, ref, older, kind)
    np.testing.assert_allclose(estimate.detach(), reference.unbiased_kl(*given_to_both), rtol=1e-4, atol=1e-12)
    precise = np.abs(log_ratios) < 10  # beyond, the two terms of k3's slope cancel in float32
    slopes = reference.unbiased_kl_slope(*given_to_both)
    np.testing.assert_allclose(logps.grad[precise], slopes[precise], rtol=1e-3, atol=1e-5)


def test_it_is_trls_bias_correction():
    """`per_token_kl * coef_1` of `GRPOTrainer`, written out, in value and gradient."""
    rng = np.random.default_rng(0)
    old, ref = (torch.tensor(rng.normal(-2, 1, 500), dtype=torch.float32) for _ in range(2))
    ours = old + torch.tensor(rng.normal(0, 0.3, 500), dtype=torch.float32)
    theirs = ours.clone().requires_grad_()
    ours.requires_grad_()
    kl = unbiased_kl(ours, ref, old)
    kl.sum().backward()
    per_token_kl = torch.exp(ref - theirs) - (ref - theirs) - 1
    per_token_kl = per_token_kl * torch.exp(theirs - old)
    per_token_kl.sum().backward()
    torch.testing.assert_close(kl, per_token_kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_weighted_penalty_in_the_reward_is_a_mistake():
    settings = {"preset": "ppo", "algo.kl_coef": 0.1, "algo.kl_unbiased": True}
    with pytest.raises(UserError, match=r"^algo\.kl_unbiased: with algo\.kl_in=reward the penalty has no gradient"):
        Config.build({**settings, "algo.kl_in": "reward"})
    assert Config.build({**settings, "algo.kl_kind": "k1"}).algo.kl_unbiased, "k1 has a gradient now"


def test_an_unknown_estimator_is_an_error():
    for function in (kl_penalty, reference.kl_penalty, reference.kl_slope):
        with pytest.raises(ValueError, match="unknown kl kind 'k4'"):
            function(torch.zeros(1), torch.zeros(1), "k4")


def exact(log_ratio):
    with localcontext() as context:
        context.prec = 60
        d = -Decimal(log_ratio)
        return float(d.exp() - d - 1)


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_k3_is_precise_where_policies_hardly_differ(size):
    """exp(d) − d − 1 in float32 is off by a quarter at d = 0.001, and by more than its value below; expm1(d) − d in
    float32 still by a tenth at 1e-6."""
    log_ratios = (torch.linspace(-3, 3, 40) * size).requires_grad_()
    estimate = kl_penalty(log_ratios, torch.zeros(40), "k3")
    estimate.sum().backward()
    wanted = [exact(x.item()) for x in log_ratios]
    np.testing.assert_allclose(estimate.detach(), wanted, rtol=2e-7)
    np.testing.assert_allclose(reference.kl_penalty(log_ratios.detach(), 0.0), wanted, rtol=1e-7)
    np.testing.assert_allclose(log_ratios.grad, -np.expm1(-log_ratios.detach().double()), rtol=2e-7)
    assert (estimate > 0).all()


def test_an_estimator_without_a_gradient_is_refused_in_the_loss():
    words = r"algo\.kl_kind: k1 with algo\.kl_in=loss: its gradient is 0 in expectation.*; set algo\.kl_kind=k1\+"
    with pytest.raises(UserError, match=words):
        Config.build({"algo.kl_coef": 0.01, "algo.kl_kind": "k1"})
    assert Config.build({"algo.kl_kind": "k1"})  # without a coefficient there is no penalty
    in_reward = {"algo.kl_coef": 0.01, "algo.kl_kind": "k1", "algo.kl_in": "reward", "algo.advantage": "gae"}
    assert Config.build(in_reward).kl_in_reward
    for kind in ("k2", "k3", "k1+", "k3+"):
        assert Config.build({"algo.kl_coef": 0.01, "algo.kl_kind": kind}).algo.kl_kind == kind
