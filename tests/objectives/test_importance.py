"""Importance weights: values by hand, NumPy's, and what the decoupled objective must equal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import dapo_policy_loss, importance_weights, reference
from dapo_rl.objectives.importance import above_cap

LN = math.log
QUICK = settings(max_examples=60, deadline=None)
AGGREGATIONS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# Ratios proximal / behaviour: 0.5, 1.5, 4, 2 (the cap itself).
PROXIMAL = [LN(0.1), LN(0.3), LN(0.8), LN(0.4)]
BEHAVIOUR = [LN(0.2), LN(0.2), LN(0.2), LN(0.2)]


@pytest.mark.parametrize(("mode", "expected"), [("truncate", [0.5, 1.5, 2.0, 2.0]), ("mask", [0.5, 1.5, 0.0, 2.0])])
def test_weights_by_hand(mode, expected):
    # Slightly above the ratio 2, which rounding may put on either side of a cap of 2.
    cap = 2.000001
    weights = importance_weights(torch.tensor(PROXIMAL), torch.tensor(BEHAVIOUR), cap=cap, mode=mode)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
    assert reference.importance_weights(PROXIMAL, BEHAVIOUR, cap=cap, mode=mode) == pytest.approx(expected, rel=1e-5)
    above = above_cap(torch.tensor(PROXIMAL), torch.tensor(BEHAVIOUR), torch.ones(4, dtype=torch.bool), cap)
    assert above.tolist() == [False, False, True, False]


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_the_decoupled_loss_by_hand(library):
    """Two tokens of advantage 1 with the ratios 1.5 and 1.1 to the proximal policy, and the weights 3 → 2 and 0.5."""
    new, old, behaviour = [LN(0.6), LN(0.44)], [LN(0.4), LN(0.4)], [LN(0.4 / 3), LN(0.8)]
    if library == "torch":
        weights = importance_weights(torch.tensor(old), torch.tensor(behaviour), cap=2.0)
        loss = dapo_policy_loss(torch.tensor(new), torch.tensor(old), torch.ones(2), weights=weights).item()
    else:
        weights = reference.importance_weights(old, behaviour, cap=2.0)
        loss = reference.dapo_policy_loss(new, old, [1.0, 1.0], weights=weights)
    assert loss == pytest.approx(-(2 * 1.28 + 0.5 * 1.1) / 2, rel=1e-5)


def test_an_unknown_mode_is_an_error():
    for library, values in ((importance_weights, torch.zeros(1)), (reference.importance_weights, [0.0])):
        with pytest.raises(ValueError, match="unknown importance mode 'clip'"):
            library(values, values, cap=1.0, mode="clip")


def test_weights_have_no_gradient_and_far_policies_do_not_overflow():
    proximal = torch.tensor([0.0, -300.0, 5.0], requires_grad=True)
    weights = importance_weights(proximal, torch.tensor([-300.0, 0.0, float("nan")]), torch.tensor([1, 1, 0]), cap=1e30)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])
    assert reference.importance_weights([0.0, -300.0], [-300.0, 0.0], cap=1e30) == pytest.approx(
        [math.exp(20), math.exp(-20)]
    )


@st.composite
def policies(draw, min_samples=1):
    """Log-probabilities of tokens under three policies, with advantages and a mask of at least one token."""
    samples, width = draw(st.integers(min_samples, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    behaviour = rng.normal(-2, 1, (samples, width))
    proximal = behaviour + rng.normal(0, draw(st.sampled_from([0.1, 1.0])), behaviour.shape)
    mask = np.arange(width) < rng.integers(0, width + 1, samples)[:, None]
    mask[0, 0] = True
    return {
        "new": proximal + rng.normal(0, 0.3, behaviour.shape),
        "old": proximal,
        "behaviour": behaviour,
        "advantages": rng.normal(0, 1, samples),
        "mask": mask,
    }


def decoupled(batch, rows=slice(None), cap=2.0, mode="truncate", **how):
    """The loss of some rows, with its gradient by the current policy's log-probabilities."""
    new = torch.tensor(batch["new"][rows], requires_grad=True)
    old, behaviour, advantages, mask = (
        torch.tensor(batch[name][rows]) for name in ("old", "behaviour", "advantages", "mask")
    )
    weights = importance_weights(old, behaviour, mask, cap=cap, mode=mode)
    loss = dapo_policy_loss(new, old, advantages, mask, weights=weights, **how)
    loss.backward()
    return loss.item(), new.grad.numpy()


@QUICK
@given(policies(), st.sampled_from([0.5, 1.0, 2.0, 1e9]), st.sampled_from(["truncate", "mask"]))
def test_torch_equals_numpy(batch, cap, mode):
    arrays = batch["old"], batch["behaviour"], batch["mask"]
    weights = reference.importance_weights(*arrays, cap=cap, mode=mode)
    ours = importance_weights(*(torch.tensor(a) for a in arrays), cap=cap, mode=mode)
    np.testing.assert_allclose(ours, weights, rtol=1e-4)
    loss, _ = decoupled(batch, cap=cap, mode=mode)
    expected = reference.dapo_policy_loss(
        batch["new"], batch["old"], batch["advantages"], batch["mask"], weights=weights
    )
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)


@QUICK
@given(policies(), st.sampled_from(AGGREGATIONS), st.sampled_from(["truncate", "mask"]))
def test_without_a_cap_a_proximal_policy_that_sampled_gives_the_plain_loss(batch, aggregation, mode):
    same = batch | {"behaviour": batch["old"]}
    loss, gradient = decoupled(same, cap=math.inf, mode=mode, aggregation=aggregation)
    new = torch.tensor(batch["new"], requires_grad=True)
    tensors = [torch.tensor(batch[name]) for name in ("old", "advantages", "mask")]
    plain = dapo_policy_loss(new, *tensors, aggregation=aggregation)
    plain.backward()
    assert loss == plain.item()
    np.testing.assert_array_equal(gradient, new.grad)


@QUICK
@given(policies(), st.sampled_from([1.0, 2.0]))
def test_three_equal_policies_give_the_policy_gradient(batch, cap):
    equal = batch | {"new": batch["old"], "behaviour": batch["old"]}
    _, gradient = decoupled(equal, cap=cap)
    expected = np.where(batch["mask"], -batch["advantages"][:, None], 0.0) / batch["mask"].sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@QUICK
@given(policies(min_samples=2), st.sampled_from(["truncate", "mask"]), st.data())
def test_neither_splitting_nor_permuting_changes_loss_or_gradient(batch, mode, data):
    samples, how = len(batch["new"]), {"mode": mode, "denominator": int(batch["mask"].sum())}
    loss, gradient = decoupled(batch, **how)
    cut = data.draw(st.integers(1, samples - 1))
    parts = [decoupled(batch, rows, **how) for rows in (slice(0, cut), slice(cut, None))]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), gradient, rtol=1e-5, atol=1e-7)
    order = data.draw(st.permutations(range(samples)))
    permuted_loss, permuted_gradient = decoupled(batch, list(order), **how)
    assert permuted_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(permuted_gradient, gradient[list(order)], rtol=1e-5, atol=1e-7)


def expected_gradient(logits, sampled_from, rewards, cap):
    """The gradient by the logits, summed over the outcomes of one draw from another policy; `cap` None: no weights."""
    parameters = torch.tensor(logits, requires_grad=True)
    logps = torch.log_softmax(parameters, -1)
    behaviour = torch.log_softmax(torch.tensor(sampled_from), -1)
    proximal = logps.detach()
    weights = None if cap is None else importance_weights(proximal, behaviour, cap=cap)
    one = torch.ones(1)
    total = sum(
        behaviour[k].exp()
        * dapo_policy_loss(
            logps[k : k + 1],
            proximal[k : k + 1],
            rewards[k] * one,
            weights=None if weights is None else weights[k : k + 1],
        )
        for k in range(len(logits))
    )
    total.backward()
    return parameters.grad


@QUICK
@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_weighted_samples_of_another_policy_have_the_on_policy_gradient(outcomes, seed):
    """Exactly, over all outcomes; the closed form is −p·(R − E[R])."""
    rng = np.random.default_rng(seed)
    logits, other, rewards = rng.normal(0, 1, (3, outcomes))
    rewards = rewards.tolist()
    weighted = expected_gradient(logits, other, rewards, cap=math.inf)
    on_policy = expected_gradient(logits, logits, rewards, cap=None)
    p = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(on_policy, -p * (rewards - p @ rewards), atol=1e-5)
    np.testing.assert_allclose(weighted, on_policy, atol=1e-5)


def test_without_weights_or_with_a_low_cap_the_gradient_is_biased():
    logits, other, rewards = [0.0, 0.0, 0.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]
    on_policy = expected_gradient(logits, logits, rewards, cap=None)
    for cap in (None, 1.0):
        assert (expected_gradient(logits, other, rewards, cap) - on_policy).abs().max() > 0.05
