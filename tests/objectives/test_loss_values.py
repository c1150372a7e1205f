"""Values worked out by hand: the loss under each aggregation, dual clip, masks, and the clip fractions."""

import math
import warnings

import pytest
import torch

from dapo_rl.algo import aggregate, clip_fractions, dapo_policy_loss, reference

LN = math.log


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


# Two samples: three tokens with advantage +1, one token with advantage −2. Ratios 1.5, 1.1, 0.5 | 0.5.
NEW = tensor([LN(1.5), LN(1.1), LN(0.5)], [LN(0.5), 0.0, 0.0])
OLD = torch.zeros(2, 3)
ADVANTAGES = torch.tensor([1.0, -2.0])
MASK = torch.tensor([[True, True, True], [True, False, False]])
# Objectives: min(1.5, 1.28) = 1.28, 1.1, 0.5 | max(0.5, 0.8)·(−2) = −1.6
SUM_1, SUM_2 = -(1.28 + 1.1 + 0.5), 1.6


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (SUM_1 + SUM_2) / 4),
        ("token-mean-per-group", (SUM_1 + SUM_2) / 4),
        ("seq-mean-token-mean", (SUM_1 / 3 + SUM_2 / 1) / 2),
        ("seq-mean-token-sum-norm", (SUM_1 / 10 + SUM_2 / 10) / 2),
        ("micro-batch-token-mean", (SUM_1 + SUM_2) / 4),
    ],
)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_each_aggregation_by_hand(aggregation, expected, library):
    norm = {"norm_length": 10} if aggregation == "seq-mean-token-sum-norm" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if library == "torch":
            loss = dapo_policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregation=aggregation, **norm).item()
        else:
            loss = reference.dapo_policy_loss(
                NEW.numpy(), OLD.numpy(), ADVANTAGES.numpy(), MASK.numpy(), aggregation=aggregation, **norm
            )
    assert loss == pytest.approx(expected, rel=1e-6)


def test_per_group_is_the_mean_of_group_means():
    """Eq. 8 to the letter: groups {0, 1} with 4 tokens and {2} with 2 tokens weigh the same."""
    values = tensor([1, 2, 3], [6, 0, 0], [10, 20, 0])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    group_tokens = torch.tensor([4, 4, 2])
    expected = ((1 + 2 + 3 + 6) / 4 + (10 + 20) / 2) / 2
    assert aggregate(values, mask, "token-mean-per-group", group_tokens=group_tokens).item() == pytest.approx(expected)
    assert aggregate(values, mask, "token-mean").item() == pytest.approx(42 / 6)


def test_micro_batch_token_mean_warns():
    with pytest.warns(UserWarning, match="depends on how the batch is split"):
        dapo_policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregation="micro-batch-token-mean")


def test_denominator_overrides_the_count():
    assert dapo_policy_loss(NEW, OLD, ADVANTAGES, MASK, denominator=100).item() == pytest.approx((SUM_1 + SUM_2) / 100)


def test_clip_bounds_are_decoupled():
    """A ratio of 1.25 is inside [0.8, 1.28] and outside [0.8, 1.2]."""
    new, old, one = torch.tensor([LN(1.25)]), torch.zeros(1), torch.ones(1)
    assert dapo_policy_loss(new, old, one).item() == pytest.approx(-1.25)
    assert dapo_policy_loss(new, old, one, clip_high=0.2).item() == pytest.approx(-1.2)
    assert dapo_policy_loss(torch.tensor([LN(0.75)]), old, -one, clip_low=0.2).item() == pytest.approx(0.8)
    assert dapo_policy_loss(torch.tensor([LN(0.75)]), old, -one, clip_low=0.3).item() == pytest.approx(0.75)


def test_dual_clip_bounds_what_a_negative_advantage_may_cost():
    new, old, minus = torch.tensor([LN(5.0)]), torch.zeros(1), -torch.ones(1)
    assert dapo_policy_loss(new, old, minus).item() == pytest.approx(5.0)
    assert dapo_policy_loss(new, old, minus, clip_ratio_c=3.0).item() == pytest.approx(3.0)
    assert dapo_policy_loss(new, old, -minus, clip_ratio_c=3.0).item() == pytest.approx(-1.28)


def test_clip_fractions_by_hand():
    # A token of advantage 0 has no gradient to cut off.
    new = torch.tensor([LN(1.3), LN(1.27), LN(0.7), LN(0.7), LN(4.0), LN(2.0)])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 0.0])
    high, low, dual = clip_fractions(new, torch.zeros(6), advantages, clip_ratio_c=3.0)
    assert (high.item(), low.item(), dual.item()) == pytest.approx((1 / 6, 1 / 6, 1 / 6))
    assert clip_fractions(new, torch.zeros(6), advantages).dual.item() == 0


def test_a_clipped_token_has_no_gradient():
    new = torch.tensor([LN(1.5), LN(1.1)], requires_grad=True)
    dapo_policy_loss(new, torch.zeros(2), torch.ones(2)).backward()
    assert new.grad.tolist() == pytest.approx([0.0, -1.1 / 2])


def test_half_precision_comes_in_float32_goes_on():
    loss = dapo_policy_loss(NEW.bfloat16(), OLD.bfloat16(), ADVANTAGES.bfloat16(), MASK)
    assert loss.dtype == torch.float32


def test_everything_masked_is_zero_with_zero_gradient():
    new = NEW.clone().requires_grad_()
    for aggregation in ("token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        loss = dapo_policy_loss(new, OLD, ADVANTAGES, torch.zeros_like(MASK), aggregation=aggregation)
        loss.backward()
        assert loss.item() == 0
        assert new.grad.abs().sum().item() == 0
