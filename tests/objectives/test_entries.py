"""The members of the family: values worked out by hand, NumPy twins, and what holds for each of them."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_tables import PAGE, with_tables

from dapo_rl.algo import aggregate, reference
from dapo_rl.config import AlgoSettings, Config
from dapo_rl.errors import UserError
from dapo_rl.objectives import ADVANTAGES, GAE, LOSSES
from dapo_rl.objectives.aggregation import clipped_tokens
from dapo_rl.objectives.losses import gspo_losses, gspo_token_losses, policy_token_losses, sequence_ratio
from dapo_rl.train.custom import build_advantages, build_losses, build_ratio

QUICK = settings(max_examples=30, deadline=None)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
# The ratios are 2 and 1 in the first sample, 0.9 and 1.1 in the second.
NEW = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
OLD = NEW - torch.tensor([[2.0, 1.0], [0.9, 1.1]]).log()
ONE_EACH = torch.tensor([1.0, -2.0])
MASK = torch.ones(2, 2).bool()


def gradient(losses, aggregation="token-mean", advantages=ONE_EACH, **bounds):
    new = NEW.clone().requires_grad_()
    loss = aggregate(losses(new, OLD, advantages, MASK, **(BOUNDS | bounds)), MASK, aggregation)
    loss.backward()
    return loss.item(), new.grad


# GSPO: s = (Π r_t)^(1/|y|); the loss is −min(s A, clip(s) A), averaged over samples (verl: seq-mean-token-mean).


@pytest.mark.parametrize("losses", [gspo_losses, gspo_token_losses])
def test_gspo_by_hand(losses):
    """s = √2 and √0.99. The first, at A = 1, is clipped to 1.28, without a gradient; the second, at A = −2, gives
    2 √0.99. Their mean is (−1.28 + 1.989975) / 2, and each token of the second has the gradient 2 √0.99 / (2 · 2).
    """
    by_token = losses(NEW, OLD, ONE_EACH, MASK, **BOUNDS)
    np.testing.assert_allclose(by_token, [[-1.28, -1.28], [1.989975, 1.989975]], rtol=1e-6)
    loss, slope = gradient(losses, "seq-mean-token-mean")
    assert loss == pytest.approx(0.3549874)
    np.testing.assert_allclose(slope, [[0, 0], [0.497494, 0.497494]], rtol=1e-5)


def test_the_token_variant_gives_each_token_its_own_advantage():
    """In the second sample A is −2 and −4: with s in common, a token learns from their mean, −3, or from its own."""
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -4.0]])
    s = 0.99**0.5
    _, in_common = gradient(gspo_losses, advantages=advantages)
    _, own = gradient(gspo_token_losses, advantages=advantages)
    np.testing.assert_allclose(in_common[1], [3 * s / 4, 3 * s / 4], rtol=1e-5)
    np.testing.assert_allclose(own[1], [2 * s / 4, 4 * s / 4], rtol=1e-5)


def test_a_sequence_is_clipped_as_a_whole():
    assert policy_token_losses(NEW, OLD, ONE_EACH, MASK, **BOUNDS)[0].tolist() == pytest.approx([-1.28, -1])
    ratio_of = build_ratio(AlgoSettings(loss="gspo"))
    assert ratio_of is sequence_ratio
    high, low, _ = clipped_tokens(NEW, OLD, ONE_EACH, MASK, **BOUNDS, ratio_of=ratio_of)
    assert (high.tolist(), low.any()) == ([[True, True], [False, False]], False)
    assert clipped_tokens(NEW, OLD, ONE_EACH, MASK, **BOUNDS)[0].tolist() == [[True, False], [False, False]]


# CISPO: −sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π, averaged over tokens.


def test_cispo_by_hand():
    """With bounds of 0.05 and 0.5 the weights are 1.5, 1, 0.95 and 1.1. The losses are 1.5 · 1, 1 · 2, −0.95 · 2 · 0.5
    and −1.1 · 2 · 3; a gradient is −weight · A / 4, also beyond the bounds.
    """
    bounds = {"clip_low": 0.05, "clip_high": 0.5}
    losses = LOSSES["cispo"].function(NEW, OLD, ONE_EACH, MASK, **bounds)
    np.testing.assert_allclose(losses, [[1.5, 2.0], [-0.95, -6.6]], rtol=1e-5)
    loss, slope = gradient(LOSSES["cispo"].function, **bounds)
    assert loss == pytest.approx(-4.05 / 4)
    np.testing.assert_allclose(slope, [[-0.375, -0.25], [0.475, 0.55]], rtol=1e-5)


def test_cispo_has_bounds_above_1_and_the_others_do_not():
    """Weights up to 5 and no lower bound: 2, 1, 0.9 and 1.1, as they are."""
    algo = {"algo.loss": "cispo", "algo.clip_low": 1, "algo.clip_high": 4}
    chosen = Config.build(algo).algo
    _, slope = gradient(build_losses(chosen), clip_low=chosen.clip_low, clip_high=chosen.clip_high, clip_ratio_c=None)
    np.testing.assert_allclose(slope, [[-0.5, -0.25], [0.45, 0.55]], rtol=1e-5)
    with pytest.raises(UserError, match=r"algo\.clip_low: -1 is not 0 or more; algo\.loss=cispo clips at"):
        Config.build(algo | {"algo.clip_low": -1})
    assert Config.build(algo | {"algo.loss": "own.py:f"}).algo.clip_high == 4
    for name in ("dapo", "gspo", "gspo-token"):
        with pytest.raises(UserError, match=r"outside \[0, 1\)"):
            Config.build(algo | {"algo.loss": name})


# Advantages.


def test_opo_by_hand():
    """Weighted by length the mean is (2 · 1) / 4 in the first group and (1 + 1) / 4 in the second."""
    rewards, lengths = torch.tensor([[1.0, 0, 0], [1, 1, 0]]), torch.tensor([[2, 1, 1], [1, 1, 2]])
    advantages = ADVANTAGES["opo"].function(rewards, lengths=lengths)
    assert advantages.tolist() == [[0.5, -0.5, -0.5], [0.5, 0.5, -0.5]]


def test_reinforce_plus_plus_by_hand():
    """The tokens return 1, 1, 1, 0, 0, 0: mean 0.5, variance 6 · 0.25 / 5 = 0.3. Less the group's mean they return
    0.5, 0.5, 0.5, −0.5, 0, 0: mean 1/6, variance 1/6.
    """
    rewards, lengths = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[3, 1], [1, 1]])
    ours = ADVANTAGES["reinforce++"].function(rewards, lengths=lengths, eps=0)
    np.testing.assert_allclose(ours, np.array([[1, -1], [-1, -1]]) * 0.5 / 0.3**0.5, rtol=1e-6)
    ours = ADVANTAGES["reinforce++-baseline"].function(rewards, lengths=lengths, eps=0)
    np.testing.assert_allclose(ours, np.array([[2, -4], [-1, -1]]) / 6**0.5, rtol=1e-6)


def test_one_sample_per_prompt_where_the_batch_is_the_baseline():
    alone = {"sampling.group_size": 1, "sampling.dynamic": False}
    assert Config.build(alone | {"algo.advantage": "reinforce++"})
    with pytest.raises(UserError, match=r"1 with algo\.advantage=opo: one sample has nothing"):
        Config.build(alone | {"algo.advantage": "opo"})
    with pytest.raises(UserError, match=r"algo\.advantage: 'rloo' is not one of .*; set algo\.normalize=leave-one-out"):
        Config.build({"algo.advantage": "rloo"})


# Every member.


@pytest.mark.parametrize("name", LOSSES)
@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_a_loss_equals_its_twin_and_depends_on_its_own_sample_alone(name, seed):
    rng = np.random.default_rng(seed)
    old, mask = rng.normal(-2, 1, (5, 6)), rng.random((5, 6)) < 0.8
    new = old + rng.normal(0, 0.3, old.shape)
    advantages = rng.normal(0, 1, 5)
    function = build_losses(AlgoSettings(loss=name))

    def ours(rows, columns=slice(None)):
        logps = torch.tensor(np.where(mask, new, np.nan)[rows][:, columns], requires_grad=True)
        arrays = (torch.tensor(array[rows][:, columns]) for array in (old, mask))
        before, counted = arrays
        losses = function(logps, before, torch.tensor(advantages[rows]), counted, **BOUNDS, clip_ratio_c=None)
        losses.sum().backward()
        return losses.detach().numpy(), logps.grad.numpy()

    losses, slopes = ours(slice(None))
    twin = getattr(reference, LOSSES[name].function.__name__)
    np.testing.assert_allclose(losses, twin(new, old, advantages, mask, **BOUNDS), rtol=1e-4, atol=1e-5)
    assert np.isfinite(slopes).all()
    assert (losses[~mask] == 0).all()
    assert (slopes[~mask] == 0).all()
    order = rng.permutation(5)
    for part in (order[:2], order[2:]):
        for whole, alone in zip((losses, slopes), ours(part), strict=True):
            np.testing.assert_allclose(alone, whole[part], rtol=1e-4, atol=1e-6)


def test_gae_starts_from_the_rewards():
    """What a critic makes of them: test_gae.py, tests/train/test_critic.py."""
    estimate = build_advantages(AlgoSettings(advantage=GAE))
    rewards = torch.tensor([[1.0, -1.0, 0.5]])
    assert estimate(rewards, None).tolist() == rewards.tolist()
    assert estimate(rewards, torch.tensor([[True, False, True]])).tolist() == [[1.0, 0.0, 0.5]]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != GAE])
@QUICK
@given(seed=st.integers(0, 2**32 - 1), masked=st.booleans())
def test_an_estimator_equals_its_twin_and_does_not_depend_on_the_order(name, seed, masked):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(-1, 2, (4, 3)).astype(float)
    lengths, mask = rng.integers(1, 9, (4, 3)), rng.random((4, 3)) < 0.7 if masked else None
    function = ADVANTAGES[name].function
    twin = getattr(reference, function.__name__)
    given = {"lengths": lengths} if "lengths" in inspect.signature(twin).parameters else {}
    estimate = build_advantages(AlgoSettings(advantage=name))
    tensors = torch.tensor(rewards), None if mask is None else torch.tensor(mask), torch.tensor(lengths)
    ours = estimate(*tensors)
    np.testing.assert_allclose(ours, twin(rewards, mask=mask, **given), rtol=1e-4, atol=1e-5)
    order = torch.tensor(rng.permutation(4))
    there = (tensor if tensor is None else tensor[order].flip(-1) for tensor in tensors)
    np.testing.assert_allclose(estimate(*there), ours[order].flip(-1), rtol=1e-4, atol=1e-5)
    if mask is not None:
        assert (ours[~tensors[1]] == 0).all()
    equal = estimate(torch.full((4, 3), 0.1), tensors[1], tensors[2])
    assert equal.abs().max() == 0


def test_a_setting_that_a_loss_does_not_use_is_an_error():
    for name, entry in LOSSES.items():
        settings = {"algo.loss": name, "algo.clip_ratio_c": 3}
        if entry.dual_clip:
            assert Config.build(settings)
        else:
            with pytest.raises(UserError, match=rf"clip_ratio_c: 3 with algo\.loss={name}, which has no dual clip"):
                Config.build(settings)


def test_the_page_has_the_tables():
    page = PAGE.read_text()
    assert with_tables(page) == page, "run `make tables`"
    stale = page.replace("| `cispo` |", "| `sicpo` |")
    assert stale != page
    assert with_tables(stale) == page
