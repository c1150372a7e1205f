"""Weights of samples, bounds on both sides, rejection and off-policy masks: values by hand, and NumPy's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import importance_weights, reference
from dapo_rl.choices import REJECTIONS
from dapo_rl.objectives.importance import (
    above_cap,
    chi_squared,
    effective_sample_size,
    importance_ratio,
    off_policy_mask,
    weight_scale,
)
from dapo_rl.objectives.rejection import rejected_tokens

LN = math.log
QUICK = settings(max_examples=60, deadline=None)

# The ratios proximal / behaviour of three samples: 2, 0.5, 3 · 0.1, 1.2 · 1, 1, 1; the last token of the second is
# masked.
RATIOS = [[2.0, 0.5, 3.0], [0.1, 1.2, 100.0], [1.0, 1.0, 1.0]]
MASK = [[True, True, True], [True, True, False], [True, True, True]]
BEHAVIOUR = np.full((3, 3), -2.0)
PROXIMAL = BEHAVIOUR + np.log(RATIOS)


def tensors(*arrays):
    return tuple(torch.tensor(np.asarray(array)) for array in arrays)


def both(name, function, *arrays, **how):
    """The result in PyTorch, which NumPy's must equal."""
    ours, theirs = function(*tensors(*arrays), **how), getattr(reference, name)(*arrays, **how)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-6)
    return ours.numpy()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [[2.5, 2.5, 2.5], [0.12, 0.12, 1], [1, 1, 1]]),  # 2 · 0.5 · 3 = 3 is above the cap
        ({"floor": 0.4}, [[2.5, 2.5, 2.5], [0.4, 0.4, 1], [1, 1, 1]]),
        ({"floor": 0.4, "mode": "mask"}, [[0, 0, 0], [0, 0, 1], [1, 1, 1]]),
        ({"floor": 0.4, "level": "token"}, [[2, 0.5, 2.5], [0.4, 1.2, 1], [1, 1, 1]]),
        ({"floor": 0.4, "level": "token", "mode": "mask"}, [[2, 0.5, 0], [0, 1.2, 1], [1, 1, 1]]),
    ],
)
def test_weights_of_samples_and_between_two_bounds(how, expected):
    how = {"cap": 2.5, "level": "sequence", **how}
    weights = both("importance_weights", importance_weights, PROXIMAL, BEHAVIOUR, MASK, **how)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_a_sample_is_above_the_cap_as_a_whole():
    above = both("above_cap", above_cap, PROXIMAL, BEHAVIOUR, MASK, cap=2.5, level="sequence")
    assert above.tolist() == [[True] * 3, [False] * 3, [False] * 3]


def test_products_of_ratios_are_bounded():
    far = np.full((1, 40), -1.0)
    ratios = both("importance_ratio", importance_ratio, far + 1, far, np.ones((1, 40), bool), level="sequence")
    assert ratios[0, 0] == pytest.approx(math.exp(20))
    with pytest.raises(ValueError, match="unknown importance level 'turn'"):
        importance_ratio(*tensors(far, far), level="turn")
    with pytest.raises(ValueError, match="unknown importance level 'turn'"):
        reference.importance_ratio(far, far, level="turn")


@pytest.mark.parametrize(
    ("bounds", "rejected"),
    [
        ({}, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ({"token": (0.4, 2.5)}, [[0, 0, 1], [1, 0, 0], [0, 0, 0]]),
        # Means of the logarithms: ln 3 / 3, whose exponential is 1.44, and ln 0.12 / 2: 0.346.
        ({"geometric": (0.35, 1.5)}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ({"geometric": (0.34, 1.43)}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ({"product": (0.1, 2.9)}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        # r − 1 − ln r: 0.307, 0.193, 0.901, whose mean is 0.467; 1.403, 0.018: 0.710.
        ({"k3": 0.5}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ({"k3": 0.46}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ({"veto": 0.2}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ({"veto": 0.05}, [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ({"veto": 0.2, "token": (0.4, 2.5)}, [[0, 0, 1], [1, 1, 0], [0, 0, 0]]),
    ],
)
def test_rejected_tokens_by_hand(bounds, rejected):
    mask = both("rejected_tokens", rejected_tokens, PROXIMAL, BEHAVIOUR, MASK, bounds=bounds)
    assert mask.astype(int).tolist() == rejected
    # A sample alone.
    for i in range(3):
        alone = both("rejected_tokens", rejected_tokens, PROXIMAL[i], BEHAVIOUR[i], MASK[i], bounds=bounds)
        assert alone.astype(int).tolist() == rejected[i]


def test_an_unknown_statistic_is_an_error():
    for library, arrays in ((rejected_tokens, tensors(PROXIMAL, BEHAVIOUR, MASK)), (reference.rejected_tokens, ())):
        with pytest.raises(ValueError, match="unknown statistic 'k4'"):
            library(*(arrays or (PROXIMAL, BEHAVIOUR, MASK)), {"k4": 1.0})


def test_a_negative_sample_that_diverges_is_masked():
    # The current policy finds the tokens half as likely as the one that sampled them: log-ratios of ln 2.
    behaviour = np.full((4, 2), -1.0)
    new = behaviour + np.array([[-LN(2), -LN(2)], [-LN(2), -LN(2)], [LN(2), LN(2)], [-2 * LN(2), 0]])
    mask = np.array([[True, True], [True, True], [True, True], [True, False]])
    advantages = np.array([-1.0, 1.0, -1.0, -1.0])
    masked = both("off_policy_mask", off_policy_mask, new, behaviour, advantages, mask, threshold=0.6)
    assert masked.tolist() == [[True, True], [False, False], [False, False], [True, False]]
    masked = both("off_policy_mask", off_policy_mask, new, behaviour, advantages, mask, threshold=0.7)
    assert masked.tolist() == [[False, False]] * 3 + [[True, False]]
    # With advantages of tokens, those of the sample that are negative.
    each = np.array([[-1.0, 1.0]] * 4)
    masked = both("off_policy_mask", off_policy_mask, new, behaviour, each, mask, threshold=0.6)
    assert masked.tolist() == [[True, False], [True, False], [False, False], [True, False]]


def test_statistics_of_weights():
    assert float(effective_sample_size(torch.ones(5))) == 1
    assert float(effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0]))) == 0.25
    assert float(effective_sample_size(torch.zeros(3))) == reference.effective_sample_size([0, 0, 0]) == 0
    assert float(weight_scale(torch.tensor([1.0, 3.0]))) == reference.weight_scale([1, 3]) == 0.5
    assert float(weight_scale(torch.zeros(3))) == reference.weight_scale([0, 0, 0]) == 1
    assert float(chi_squared(torch.tensor([2.0, 0.0]))) == reference.chi_squared([2, 0]) == 1
    assert float(chi_squared(torch.ones(7))) == 0


@st.composite
def policies(draw):
    """Log-probabilities under two policies and the current one, with a mask, in which a sample may have no token."""
    samples, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    behaviour = rng.normal(-2, 1, (samples, width))
    proximal = behaviour + rng.normal(0, draw(st.sampled_from([0.1, 1.0, 15.0])), behaviour.shape)
    return proximal, behaviour, rng.random((samples, width)) < 0.7


BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from([(0.5, 2.0), (0.9, 1.1)]) if choice.two_sided else st.sampled_from([0.01, 0.6])
        for name, choice in REJECTIONS.items()
    },
)


@QUICK
@given(policies(), BOUNDS, st.data())
def test_rejection_is_numpys_and_each_sample_decides_alone(batch, bounds, data):
    proximal, behaviour, mask = batch
    rejected = both("rejected_tokens", rejected_tokens, *batch, bounds=bounds)
    assert not (rejected & ~mask).any()
    assert not both("rejected_tokens", rejected_tokens, behaviour, behaviour, mask, bounds=bounds).any()
    order = data.draw(st.permutations(range(len(mask))))
    parts = [rejected_tokens(*tensors(*(rows[[i]] for rows in batch)), bounds).numpy()[0] for i in order]
    assert (np.array(parts) == rejected[list(order)]).all()
    # Padding does not change it.
    wider = [np.pad(rows, ((0, 0), (0, 2)), constant_values=0) for rows in (proximal, behaviour, mask)]
    assert (rejected_tokens(*tensors(*wider), bounds).numpy()[:, : mask.shape[1]] == rejected).all()


@QUICK
@given(policies(), st.sampled_from(["token", "sequence"]), st.sampled_from(["truncate", "mask"]))
def test_weights_are_numpys_and_normalised_ones_have_the_mean_1(batch, level, mode):
    how = {"cap": 2.0, "floor": 0.25, "mode": mode, "level": level}
    both("importance_ratio", importance_ratio, *batch, level=level)
    weights = both("importance_weights", importance_weights, *batch, **how)
    assert (weights[~batch[2]] == 1).all()
    kept = weights[batch[2]]
    assert ((kept == 0) | ((kept >= 0.25) & (kept <= 2))).all()
    if kept.size:
        scale = float(weight_scale(torch.tensor(kept)))
        assert scale == pytest.approx(reference.weight_scale(kept), rel=1e-5)
        assert (kept * scale).mean() == pytest.approx(float(kept.any()), rel=1e-5)
        size = float(effective_sample_size(torch.tensor(kept)))
        assert size == pytest.approx(reference.effective_sample_size(kept), rel=1e-5)
        assert 0 <= size <= 1 + 1e-9
        ratios = importance_ratio(*tensors(*batch)).numpy()[batch[2]]
        assert float(chi_squared(torch.tensor(ratios))) == pytest.approx(reference.chi_squared(ratios), rel=1e-5)


@QUICK
@given(policies(), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 100))
def test_off_policy_masks_are_numpys(batch, threshold, seed):
    new, behaviour, mask = batch
    advantages = np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], len(mask))
    masked = both("off_policy_mask", off_policy_mask, new, behaviour, advantages, mask, threshold=threshold)
    assert not masked[advantages >= 0].any()
    assert ((masked == mask) | ~masked.any(-1, keepdims=True)).all(), "a sample is masked as a whole"
