"""Advantages, the dynamic-sampling filter, length penalties, KL, entropy, pass@k."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dapo_rl import algo
from dapo_rl.algo import reference

QUICK = settings(max_examples=80, deadline=None)
BOTH = pytest.mark.parametrize("library", [algo, reference], ids=["torch", "numpy"])


def call(library, name, *arrays, **options):
    if library is algo:
        arrays = [torch.as_tensor(a) for a in arrays]
        options = {k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    return np.asarray(getattr(library, name)(*arrays, **options))


rewards = hnp.arrays(float, st.tuples(st.integers(1, 5), st.integers(2, 8)), elements=st.floats(-2, 2, width=16))


@BOTH
def test_group_advantages_by_hand(library):
    """One right of four, ±1: mean −0.5, and the deviations 1.5, −0.5, −0.5, −0.5 have Σ² = 3."""
    group = np.array([[1.0, -1, -1, -1]])
    np.testing.assert_allclose(call(library, "group_advantages", group, eps=0.0), [[1.5, -0.5, -0.5, -0.5]])
    np.testing.assert_allclose(
        call(library, "group_advantages", group, eps=0.0, ddof=0),
        np.array([[1.5, -0.5, -0.5, -0.5]]) / math.sqrt(3 / 4),
    )
    np.testing.assert_allclose(call(library, "group_advantages", group, normalize="none"), [[1.5, -0.5, -0.5, -0.5]])
    np.testing.assert_allclose(
        call(library, "group_advantages", group, normalize="leave-one-out"), [[2.0, -2 / 3, -2 / 3, -2 / 3]], rtol=1e-6
    )
    two = np.array([[1.0, -1], [1, 1]])  # all four: mean 0.5, Σ² = 3, so std = 1
    np.testing.assert_allclose(
        call(library, "group_advantages", two, normalize="batch", eps=0.0), [[1.0, -1.0], [0, 0]], rtol=1e-6
    )


@BOTH
def test_the_default_is_the_sample_standard_deviation(library):
    advantages = call(library, "group_advantages", np.array([[1.0, 0.0]]), eps=0.0)
    np.testing.assert_allclose(advantages, [[math.sqrt(0.5), -math.sqrt(0.5)]], rtol=1e-6)


@BOTH
def test_masked_samples_can_leave_the_baseline(library):
    group, counted = np.array([[1.0, 0.0, -5.0]]), np.array([[True, True, False]])
    np.testing.assert_allclose(
        call(library, "group_advantages", group, normalize="none", mask=counted), [[0.5, -0.5, 0.0]]
    )


@QUICK
@given(rewards, st.sampled_from(["group", "batch", "none", "leave-one-out"]), st.sampled_from([0, 1]))
def test_advantages_torch_equals_numpy(values, normalize, ddof):
    ours = algo.group_advantages(torch.tensor(values), normalize=normalize, ddof=ddof)
    theirs = reference.group_advantages(values, normalize=normalize, ddof=ddof)
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)


@QUICK
@given(rewards, st.sampled_from(["group", "batch", "none", "leave-one-out"]), st.randoms(use_true_random=False))
def test_permuting_samples_or_groups_permutes_advantages(values, normalize, random):
    groups, samples = list(range(values.shape[0])), list(range(values.shape[1]))
    random.shuffle(groups)
    random.shuffle(samples)
    plain = reference.group_advantages(values, normalize=normalize)
    permuted = algo.group_advantages(torch.tensor(values[groups][:, samples]), normalize=normalize)
    np.testing.assert_allclose(permuted, plain[groups][:, samples], rtol=2e-3, atol=2e-4)


def test_a_constant_group_has_no_advantage_despite_rounding():
    assert algo.group_advantages(torch.full((1, 7), 0.1)).abs().max() == 0


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_one_cannot_be_normalised(ddof):
    with pytest.raises(ValueError, match="group of 1"):
        algo.group_advantages(torch.zeros(3, 1), ddof=ddof)


@BOTH
def test_filter_keeps_groups_that_are_partly_right(library):
    correct = np.array([[True, True, True], [False, False, False], [True, False, False]])
    assert call(library, "dynamic_sampling_filter", correct).tolist() == [False, False, True]
    scores = np.array([[0.5, 0.5], [0.5, 0.5 + 1e-9], [0.5, 0.6]])
    assert call(library, "dynamic_sampling_filter", scores).tolist() == [False, False, True]


@BOTH
def test_no_assumption_on_the_range_of_rewards(library):
    """With ±1 rewards `0 < mean < 1` drops every group at or below half right; this filter keeps them."""
    mostly_wrong = np.array([[1.0, -1, -1, -1]])
    assert not 0 < mostly_wrong.mean() < 1
    assert call(library, "dynamic_sampling_filter", mostly_wrong).tolist() == [True]
    assert call(library, "dynamic_sampling_filter", mostly_wrong > 0).tolist() == [True]


@QUICK
@given(hnp.arrays(bool, st.tuples(st.integers(1, 6), st.integers(1, 6))))
def test_filter_torch_equals_numpy(correct):
    kept = algo.dynamic_sampling_filter(torch.tensor(correct)).tolist()
    assert kept == reference.dynamic_sampling_filter(correct).tolist()
    assert kept == [0 < row.sum() < len(row) for row in correct]


@BOTH
def test_equation_13_at_its_corners(library):
    """The paper's lengths: nothing up to 16384, linear over the cache of 4096, −1 from 20480 on."""
    lengths = np.array([0, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 10**6])
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    np.testing.assert_allclose(
        call(library, "soft_overlong_punishment", lengths, max_length=20480, cache_length=4096), expected, atol=1e-7
    )
    np.testing.assert_allclose(
        call(library, "soft_overlong_punishment", lengths, 20480, 4096, factor=0.5), np.array(expected) / 2, atol=1e-7
    )


@BOTH
def test_no_cache_is_a_hard_step(library):
    np.testing.assert_allclose(call(library, "soft_overlong_punishment", np.array([99, 100, 101]), 100, 0), [0, 0, -1])


@QUICK
@given(st.integers(1, 500), st.data())
def test_equation_13_torch_equals_numpy_and_falls(max_length, data):
    cache = data.draw(st.integers(0, max_length))
    lengths = np.arange(0, max_length + 20)
    ours = algo.soft_overlong_punishment(torch.tensor(lengths), max_length, cache).numpy()
    np.testing.assert_allclose(ours, reference.soft_overlong_punishment(lengths, max_length, cache), atol=1e-6)
    assert (np.diff(ours) <= 1e-7).all()


@BOTH
def test_linear_shaping_by_hand(library):
    shaped = call(
        library, "overlong_reward_shaping", np.array([1.0, 1.0, -1.0, 1.0]), np.array([50, 100, 150, 1300]), 100
    )
    np.testing.assert_allclose(shaped, [1, 1, -1.05, 1 - 1.2], rtol=1e-6)


def test_plus_minus_one_keeps_right_and_late_above_wrong_and_short():
    """With 0/1 rewards a correct answer at the length limit scores what a wrong short one does; with ±1 it does not."""
    penalty = algo.soft_overlong_punishment(torch.tensor([100.0, 10.0]), 100, 20)
    zero_one, plus_minus = torch.tensor([1.0, 0.0]) + penalty, torch.tensor([1.0, -1.0]) + penalty
    assert zero_one[0] == zero_one[1]
    assert plus_minus[0] > plus_minus[1]


@BOTH
def test_kl_estimators_by_hand(library):
    logps, ref = np.array([math.log(0.5)]), np.array([math.log(0.25)])
    assert call(library, "kl_penalty", logps, ref, kind="k1")[0] == pytest.approx(math.log(2))
    assert call(library, "kl_penalty", logps, ref, kind="k2")[0] == pytest.approx(math.log(2) ** 2 / 2)
    assert call(library, "kl_penalty", logps, ref, kind="k3")[0] == pytest.approx(0.5 + math.log(2) - 1)


@QUICK
@given(st.integers(0, 10**6))
def test_k3_is_the_divergence_in_the_mean(seed):
    rng = np.random.default_rng(seed)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(0, 1, (2, 5)))
    exact = (p * np.log(p / q)).sum()
    for kind in ("k1", "k3"):
        estimates = algo.kl_penalty(torch.tensor(np.log(p)), torch.tensor(np.log(q)), kind).numpy()
        assert (p * estimates).sum() == pytest.approx(exact, rel=1e-4, abs=1e-5)


@BOTH
def test_entropy_by_hand(library):
    logits = np.array([[0.0, 0.0, 0.0, 0.0], [5.0, -np.inf, 5.0, -np.inf], [3.0, -np.inf, -np.inf, -np.inf]])
    np.testing.assert_allclose(call(library, "entropy_from_logits", logits), [math.log(4), math.log(2), 0], atol=1e-6)
    batch = np.stack([logits[:2], logits[1:]])
    expected = [[math.log(4), math.log(2)], [math.log(2), 0]]
    np.testing.assert_allclose(call(library, "entropy_from_logits", batch), expected, atol=1e-6)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n):
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(outcomes, k))
            assert algo.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_large_counts():
    assert algo.pass_at_k(1024, 1, 32) == pytest.approx(32 / 1024)
    with pytest.raises(ValueError, match="pass@5"):
        algo.pass_at_k(4, 2, 5)
