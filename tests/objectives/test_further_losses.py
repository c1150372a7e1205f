"""SAPO, GMPO, DPPO, Clip-Cov and KL-Cov: values worked out by hand, gradients, and the selection of tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import aggregate, reference
from dapo_rl.config import AlgoSettings, Config
from dapo_rl.errors import UserError
from dapo_rl.objectives import LOSSES
from dapo_rl.objectives.losses import clip_cov_losses, gmpo_losses, kl_cov_losses, sapo_losses
from dapo_rl.objectives.selection import clip_cov_mask, kl_cov_mask, token_covariances, top_entropy_mask
from dapo_rl.train.custom import build_losses, build_ratio

QUICK = settings(max_examples=40, deadline=None)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
# The ratios are 2 and 1 in the first sample, 0.5 and 1.25 in the second.
NEW = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
OLD = NEW - torch.tensor([[2.0, 1.0], [0.5, 1.25]]).log()
ONE_EACH = torch.tensor([1.0, -2.0])
MASK = torch.ones(2, 2).bool()


def slopes(losses, new=NEW, **how):
    logps = new.clone().requires_grad_()
    losses(logps, OLD, ONE_EACH, MASK, **how).sum().backward()
    return logps.grad


def test_sapo_by_hand():
    """τ = 2 where A = 1: 2 σ(2) = 1.761594 and 2 σ(0) = 1. τ = 4 where A = −2: σ(−2) = 0.119203 and σ(1) = 0.731059.
    The slope of the gate is 4 σ(1 − σ), times r and A."""
    how = {"tau_pos": 2.0, "tau_neg": 4.0}
    losses = sapo_losses(NEW, OLD, ONE_EACH, MASK, **how)
    np.testing.assert_allclose(losses, [[-1.761594, -1.0], [0.238406, 1.462117]], rtol=1e-5)
    gates = np.array([[0.880797, 0.5], [0.119203, 0.731059]])
    wanted = -4 * gates * (1 - gates) * np.array([[2.0, 1.0], [0.5, 1.25]]) * [[1], [-2]]
    np.testing.assert_allclose(slopes(sapo_losses, **how), wanted, rtol=1e-4)


def test_gmpo_by_hand():
    """With bounds of log 1.5 and log 1.5 the ratios count as 1.5 and 1, and, where A < 0, as 1/1.5 and 1.25. A token
    within its bound learns with the whole sequence, −A s / 2 for each of its two losses; one beyond it does not."""
    bound = math.log(1.5)
    how = {"clip_low": bound, "clip_high": bound}
    first, second = 1.5**0.5, (1.25 / 1.5) ** 0.5
    losses = gmpo_losses(NEW, OLD, ONE_EACH, MASK, **how)
    np.testing.assert_allclose(losses, [[-first, -first], [2 * second, 2 * second]], rtol=1e-6)
    np.testing.assert_allclose(slopes(gmpo_losses, **how), [[0, -first], [0, 2 * second]], rtol=1e-6, atol=1e-7)
    assert aggregate(losses, MASK, "seq-mean-token-mean").item() == pytest.approx((2 * second - first) / 2)
    algo = Config.build({"algo.loss": "gmpo", "algo.clip_low": 0.4, "algo.clip_high": 1.5}).algo
    assert algo.old_policy == "behaviour"


def test_dppo_by_hand():
    """The probabilities 0.5 → 0.8 and 0.4 → 0.35: for A = 1 the first has moved by 0.3, for A = −2 the second by −0.05,
    its divergence is 0.4 ln(0.4 / 0.35) + 0.6 ln(0.6 / 0.65) = 0.005387. A loss is −r A log π; r is at most c."""
    new, old = torch.tensor([[0.8, 0.35]]).log(), torch.tensor([[0.5, 0.4]]).log()
    mask = torch.ones(1, 2).bool()
    plain = np.array([[-1.6 * math.log(0.8), 2 * 0.875 * math.log(0.35)]])

    def losses(name, low, high, c=None, sign=1.0):
        advantages = sign * torch.tensor([[1.0, -2.0]])
        how = {"clip_low": low, "clip_high": high, "clip_ratio_c": c}
        return sign * LOSSES[name].function(new, old, advantages, mask, **how).numpy()

    np.testing.assert_allclose(losses("dppo-tv", 0.06, 0.31), plain, rtol=1e-5)
    np.testing.assert_allclose(losses("dppo-tv", 0.04, 0.29), 0 * plain, atol=1e-9)
    np.testing.assert_allclose(losses("dppo-tv", 0.0, 0.0, sign=-1.0), plain, rtol=1e-5)  # they move back
    np.testing.assert_allclose(losses("dppo-tv", 0.06, 0.31, c=0.8), plain * [1 / 2, 0.8 / 0.875], rtol=1e-5)
    np.testing.assert_allclose(losses("dppo-kl", 0.0054, 0.9), plain, rtol=1e-5)
    np.testing.assert_allclose(losses("dppo-kl", 0.0053, 0.9), plain * [1, 0], rtol=1e-5)
    # 0.5 ln(0.5 / 0.8) + 0.5 ln(0.5 / 0.2) = 0.223144
    np.testing.assert_allclose(losses("dppo-kl", 0.0054, 0.2231), plain * [0, 1], rtol=1e-5)
    np.testing.assert_allclose(losses("dppo-kl", 0.0054, 0.2232), plain, rtol=1e-5)


def test_dppo_has_the_policy_gradient_of_its_weight():
    how = {"clip_low": 0.9, "clip_high": 0.9}
    wanted = -np.array([[2.0, 1.0], [0.5, 1.25]]) * [[1], [-2]]
    for name in ("dppo-tv", "dppo-kl"):
        np.testing.assert_allclose(slopes(LOSSES[name].function, **how), wanted, rtol=1e-5)
    ratio = build_ratio(AlgoSettings(loss="dppo-tv"))(NEW, OLD, MASK)
    np.testing.assert_allclose(ratio, 1 + NEW.exp() - OLD.exp(), rtol=1e-6)


def test_clip_cov_and_kl_cov_by_hand():
    """DAPO's losses are −1.28, −1, 1.6 and 2.5; those selected have none. Without a clip they are −2, −1, 1 and 2.5;
    those selected have half of |log r| more."""
    chosen = torch.tensor([[True, False], [True, True]])
    losses = clip_cov_losses(NEW, OLD, ONE_EACH, MASK, **BOUNDS, cov_mask=chosen)
    np.testing.assert_allclose(losses, [[0, -1], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(
        clip_cov_losses(NEW, OLD, ONE_EACH, MASK, **BOUNDS), [[-1.28, -1], [1.6, 2.5]], rtol=1e-5
    )
    losses = kl_cov_losses(NEW, OLD, ONE_EACH, MASK, cov_mask=chosen, kl_cov_coef=0.5)
    two, more = math.log(2) / 2, math.log(1.25) / 2
    np.testing.assert_allclose(losses, [[-2 + two, -1], [1 + two, 2.5 + more]], rtol=1e-5)
    wanted = [[-2 + 0.5, -1], [1 - 0.5, 2.5 + 0.5]]
    np.testing.assert_allclose(slopes(kl_cov_losses, cov_mask=chosen, kl_cov_coef=0.5), wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["sapo", "dppo-tv", "dppo-kl", "clip-cov", "kl-cov"])
@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_a_loss_with_its_options_equals_its_twin(name, seed):
    rng = np.random.default_rng(seed)
    old, mask = np.minimum(rng.normal(-1, 1, (3, 5)), -1e-3), rng.random((3, 5)) < 0.8
    new = np.minimum(old + rng.normal(0, 0.5, old.shape), -1e-4)
    advantages, chosen = rng.normal(0, 1, 3), rng.random((3, 5)) < 0.4
    options = {"clip_low": 0.1, "clip_high": 0.15}
    if name.endswith("cov"):
        options |= {"cov_mask": chosen}
    if name.startswith("dppo"):
        options |= {"clip_ratio_c": 1.2}
    algo = AlgoSettings(loss=name, tau_pos=0.7, tau_neg=3.0, kl_cov_coef=0.3)
    tensors = (torch.tensor(array) for array in (new, old, advantages, mask))
    inputs = {key: torch.tensor(value) if key == "cov_mask" else value for key, value in options.items()}
    ours = build_losses(algo)(*tensors, **({"clip_ratio_c": None} | inputs))
    own = {"sapo": {"tau_pos": 0.7, "tau_neg": 3.0}, "kl-cov": {"kl_cov_coef": 0.3}}.get(name, {})
    twin = getattr(reference, LOSSES[name].function.__name__)
    np.testing.assert_allclose(ours, twin(new, old, advantages, mask, **options, **own), rtol=1e-4, atol=1e-5)


def test_tokens_of_high_entropy_by_hand():
    """Of 0, 1, 2, 3, 4 the quantile 0.6 is 2.4, and the quantile 0.75 is 3 itself."""
    entropy, mask = torch.tensor([4.0, 0.0, 9.0, 3.0, 1.0, 2.0]), torch.tensor([True, True, False, True, True, True])
    assert top_entropy_mask(entropy, mask, 0.4).tolist() == [True, False, False, True, False, False]
    assert top_entropy_mask(entropy, mask, 0.25).tolist() == [True, False, False, True, False, False]
    assert top_entropy_mask(entropy, mask, 0.2).tolist() == [True, False, False, False, False, False]
    assert torch.equal(top_entropy_mask(entropy, mask, 1.0), mask)
    assert not top_entropy_mask(entropy, torch.zeros(6).bool(), 0.2).any()


def test_tokens_by_covariance_by_hand():
    """Around the means −2 and 0: (1 · 3, 1 · −1, 0 · −1, −2 · −1)."""
    logps, advantages = torch.tensor([-1.0, -1.0, 7.0, -2.0, -4.0]), torch.tensor([3.0, -1.0, 9.0, -1.0, -1.0])
    mask = torch.tensor([True, True, False, True, True])
    values = token_covariances(logps, advantages, mask)
    assert values.tolist() == [3.0, -1.0, 0.0, 0.0, 2.0]
    assert kl_cov_mask(values, mask, share=0.5).tolist() == [True, False, False, False, True]
    assert kl_cov_mask(values, mask, share=0.01).tolist() == [True, False, False, False, False]
    order = torch.tensor([0.9, 0.1, 0.0, 0.2, 0.3])
    how = {"low": -0.5, "high": 2.5}
    assert clip_cov_mask(values, mask, order, share=0.01, **how).tolist() == [False, False, False, True, False]
    assert clip_cov_mask(values, mask, order, share=0.9, **how).tolist() == [False, False, False, True, True]
    assert not clip_cov_mask(values, mask, order, share=0.9, low=5.0, high=6.0).any()


@QUICK
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.01, 0.2, 0.5, 1.0]))
def test_a_selection_equals_its_twin(seed, share):
    rng = np.random.default_rng(seed)
    values, others, order = rng.normal(size=(3, 17))
    mask = rng.random(17) < 0.7
    tensors = [torch.tensor(array) for array in (values, others, order, mask)]
    first, second, keys, counted = tensors
    assert (top_entropy_mask(first, counted, share).numpy() == reference.top_entropy_mask(values, mask, share)).all()
    covariances = reference.token_covariances(values, others, mask)
    np.testing.assert_allclose(token_covariances(first, second, counted), covariances, rtol=1e-9, atol=1e-12)
    ours = kl_cov_mask(torch.tensor(covariances), counted, share=share)
    assert (ours.numpy() == reference.kl_cov_mask(covariances, mask, share=share)).all()
    how = {"share": share, "low": -0.5, "high": 0.8}
    ours = clip_cov_mask(torch.tensor(covariances), counted, keys, **how)
    assert (ours.numpy() == reference.clip_cov_mask(covariances, mask, order, **how)).all()


def test_a_band_without_width_is_a_mistake():
    with pytest.raises(UserError, match=r"^algo\.clip_cov_low: 6 is not below algo\.clip_cov_high 5"):
        Config.build({"algo.loss": "clip-cov", "algo.clip_cov_low": 6})
