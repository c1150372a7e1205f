"""GDPO: several rewards, each normalised on its own; by hand, as in TRL, and against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import full_batch, make_prompt, make_sample

from dapo_rl.algo import group_advantages, reference
from dapo_rl.choices import NORMALIZATIONS
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.objectives.advantages import gdpo_advantages
from dapo_rl.types import Group, RewardPart, Verdict

NAN = float("nan")


def test_by_hand():
    """One group, ddof 1. Of the first reward (1, 0, 0, 1) the deviations are ±0.5 and the std 1/√3: ±0.8660. Of the
    second, 100 times as large in the first two samples alone, (100, 0), they are ±0.7071. With the weights 1 and 2 the
    sums are 2.2802, −2.2802, −0.8660, 0.8660. Their std is √((2 · 5.1995 + 2 · 0.75) / 3) = 1.9916."""
    parts = torch.tensor([[[1.0, 100.0], [0.0, 0.0], [0.0, NAN], [1.0, NAN]]])
    weights = torch.tensor([1.0, 2.0]).expand(1, 4, 2)
    ours = gdpo_advantages(torch.zeros(1, 4), parts=parts, part_weights=weights, eps=0.0)
    np.testing.assert_allclose(ours, [[1.1449, -1.1449, -0.4348, 0.4348]], atol=1e-4)


def test_a_reward_of_large_spread_does_not_drown_another():
    """Summed first, the second reward hardly shows beside the first; apart, both count alike."""
    small = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    large = torch.tensor([[0.0, 0.0, 100.0, 100.0]])
    apart = gdpo_advantages(small + large, parts=torch.stack([small, large], -1))[0]
    assert (apart[1] - apart[0]).item() == pytest.approx((apart[2] - apart[0]).item(), rel=1e-5)
    summed = group_advantages(small + large)[0]
    assert summed[1] - summed[0] < 0.02 * (summed[2] - summed[0])


def test_one_reward_is_normalised_by_its_group_and_by_the_batch():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 8.0], [3.0, 3.0, 3.0]])
    within = group_advantages(rewards)
    np.testing.assert_allclose(gdpo_advantages(rewards), within / within.std(), rtol=1e-4, atol=1e-6)


def of_trl(rewards_per_func, num_generations, reward_weights):
    """`normalize_then_sum` of `GRPOTrainer`, written out with its `nanstd`."""
    from trl.trainer.utils import nanstd

    grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.shape[-1])
    mean_k = torch.nanmean(grouped, dim=1, keepdim=True)
    std_k = nanstd(grouped, dim=1, keepdim=True)
    reward_k = ((grouped - mean_k) / (std_k + 1e-4)).view(-1, rewards_per_func.shape[-1])
    rewards = (reward_k * reward_weights).nansum(dim=1)
    return ((rewards - torch.nanmean(rewards)) / (nanstd(rewards) + 1e-4)).view(-1, num_generations)


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_it_is_trls_normalize_then_sum(missing):
    pytest.importorskip("trl")
    rng = np.random.default_rng(0)
    weights = torch.tensor([1.0, 0.3, -2.0])
    for _ in range(20):
        parts = rng.normal(0, [1, 100, 1], (5, 8, 3)).astype(np.float32)
        parts[..., 0] = parts[..., 0] > 0
        parts[rng.random(parts.shape) < missing] = np.nan
        theirs = of_trl(torch.tensor(parts).view(-1, 3), 8, weights)
        ours = gdpo_advantages(
            torch.zeros(5, 8), parts=torch.tensor(parts), part_weights=weights.expand(5, 8, 3), eps=1e-4
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), masked=st.booleans())
def test_it_equals_numpy(normalize, seed, masked):
    rng = np.random.default_rng(seed)
    parts = rng.integers(-1, 2, (4, 3, 2)).astype(float)
    parts[rng.random(parts.shape) < 0.2] = np.nan
    mask = rng.random((4, 3)) < 0.7 if masked else None
    given_to_both = {"parts": parts, "part_weights": rng.normal(size=parts.shape)}
    theirs = reference.gdpo_advantages(np.zeros((4, 3)), mask, **given_to_both, normalize=normalize)
    tensors = {name: torch.tensor(array) for name, array in given_to_both.items()}
    counted = None if mask is None else torch.tensor(mask)
    ours = gdpo_advantages(torch.zeros(4, 3), counted, **tensors, normalize=normalize)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert ours.isfinite().all()


def group(draw, *scores, lengths=None):
    """Samples with the scores of `right` and `style`; None: the function did not apply."""
    lengths = lengths or [10] * len(scores)
    verdicts = []
    for right, style in scores:
        parts = [RewardPart("right", right)] + ([] if style is None else [RewardPart("style", style, 0.5)])
        verdicts.append(Verdict(sum(p.weight * p.score for p in parts), right > 0, "correct", parts=tuple(parts)))
    samples = tuple(make_sample(length) for length in lengths)
    return Group(draw, make_prompt(f"p{draw}"), samples, tuple(verdicts))


def advantages(*groups, **changes):
    base = {"algo.advantage": "gdpo", "overlong.shape": "off", "sampling.max_new_tokens": 100}
    batch = full_batch(groups, Config.build(base | changes))
    return np.array([[float(s["advantages"][0]) for s in each.samples] for each in batch])


def test_the_batch_has_the_parts_of_its_verdicts():
    groups = group(0, (1, 7.0), (0, 3.0), (0, None)), group(1, (1, 2.0), (1, 2.0), (1, 5.0))
    parts = np.array([[[1, 7], [0, 3], [0, NAN]], [[1, 2], [1, 2], [1, 5]]])
    weights = np.broadcast_to([1.0, 0.5], parts.shape)
    expected = reference.gdpo_advantages(np.zeros((2, 3)), parts=parts, part_weights=weights)
    np.testing.assert_allclose(advantages(*groups), expected, rtol=1e-4, atol=1e-5)
    assert abs(expected[1, 2]) > 0.5, "a group that is all right learns from its style"


def test_the_length_penalty_is_a_reward_of_its_own():
    """With a factor of 0.5 it has the weight 0.5, whatever its spread."""
    lengths = [[10, 90, 100], [10, 20, 30]]
    groups = [group(n, (1, None), (0, None), (0, None), lengths=own) for n, own in enumerate(lengths)]
    changes = {"overlong.shape": "soft", "overlong.cache_length": 20, "overlong.factor": 0.5}
    parts = np.array([[[1, 0], [0, -0.25], [0, -0.5]], [[1, 0], [0, 0], [0, 0]]])
    expected = reference.gdpo_advantages(
        np.zeros((2, 3)), parts=parts, part_weights=np.broadcast_to([1.0, 0.5], parts.shape)
    )
    np.testing.assert_allclose(advantages(*groups, **changes), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "limit"), [("soft", None), ("linear", 50)])
def test_an_equal_length_penalty_adds_nothing(shape, limit):
    """All samples are as long, so that only the scores differ; the rounding of score + penalty is no reward."""
    scores = (100.3, 57.7, -33.1, 8.9)
    of_length = {"overlong.shape": shape, "overlong.max_length": limit, "overlong.factor": 0.7}
    groups = [
        group(n, *((sign * score, None) for score in scores), lengths=[100] * 4) for n, sign in enumerate((1, -1))
    ]
    np.testing.assert_allclose(advantages(*groups, **of_length), advantages(*groups), rtol=1e-5)


def test_a_single_verifier_is_one_reward():
    verdicts = tuple(Verdict(score, score > 0, "correct") for score in (1.0, -1.0, -1.0))
    plain = Group(0, make_prompt("p"), tuple(make_sample(5) for _ in verdicts), verdicts)
    np.testing.assert_allclose(advantages(plain), gdpo_advantages(torch.tensor([[1.0, -1.0, -1.0]])), rtol=1e-5)


def test_turns_have_no_rewards_of_their_own():
    settings = {"algo.advantage": "gdpo", "env.name": "guess"}
    with pytest.raises(
        UserError, match=r"^env\.turn_discount: with algo\.advantage=gdpo rewards are those of whole ep"
    ):
        Config.build({**settings, "env.turn_discount": 0.9})
    assert Config.build(settings).decouples_rewards
