"""The critic's loss, explained variance and the loss of correct samples: by hand, and against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import explained_variance, positive_lm_loss, reference, value_loss

QUICK = settings(max_examples=40, deadline=None)
VALUES = torch.tensor([[1.0, 0.5], [0.0, 3.0]])
OLD = torch.tensor([[0.0, 0.5], [0.5, 9.0]])
TARGETS = torch.tensor([[1.0, 0.0], [1.0, 9.0]])
MASK = torch.tensor([[True, True], [True, False]])


def test_the_value_loss_by_hand():
    """Without clipping (0 + 0.25 + 1) / 2 over three tokens. Within ± 0.2 of the old values, V is 0.2, 0.5, 0.3: the
    squares are 0.64, 0.25 and 0.49, of which the third is below the unclipped 1.
    """
    assert value_loss(VALUES, OLD, TARGETS, MASK).item() == pytest.approx(1.25 / 6)
    assert value_loss(VALUES, OLD, TARGETS, MASK, clip=0.2).item() == pytest.approx((0.64 + 0.25 + 1) / 6)
    assert value_loss(VALUES, OLD, TARGETS, MASK, clip=0.2, denominator=10).item() == pytest.approx(1.89 / 20)
    for clip in (None, 0.2):
        theirs = reference.value_loss(VALUES.numpy(), OLD.numpy(), TARGETS.numpy(), MASK.numpy(), clip=clip)
        assert value_loss(VALUES, OLD, TARGETS, MASK, clip=clip).item() == pytest.approx(theirs)


def test_clipping_stops_the_gradient_of_a_value_that_has_moved_enough():
    """The first value left the range towards its target, the third is still inside the range of the larger error."""
    values = VALUES.clone().requires_grad_()
    value_loss(values, OLD, TARGETS, MASK, clip=0.2, denominator=1).backward()
    assert values.grad.tolist() == [[0.0, 0.5], [-1.0, 0.0]]


def test_masked_values_may_be_anything():
    values = torch.tensor([[1.0, torch.nan]], requires_grad=True)
    value_loss(values, values.detach(), torch.zeros(1, 2), torch.tensor([[True, False]])).backward()
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_explained_variance_by_hand():
    """Targets 1, 0, 1 have the variance 2/9; the errors 0, −0.5, 1 have 7/18: 1 − 7/4 = −0.75."""
    assert explained_variance(VALUES, TARGETS, MASK).item() == pytest.approx(-0.75)
    assert reference.explained_variance(VALUES, TARGETS, MASK) == pytest.approx(-0.75)
    assert explained_variance(TARGETS, TARGETS, MASK).item() == 1
    assert explained_variance(torch.full_like(TARGETS, 5.0), TARGETS, MASK).item() == pytest.approx(0, abs=1e-6)
    assert explained_variance(VALUES, torch.ones_like(VALUES), MASK).isnan()
    assert explained_variance(VALUES, TARGETS, torch.zeros_like(MASK)).isnan()


def test_the_loss_of_correct_samples_by_hand():
    """Samples 1 and 3 are correct, with 3 tokens: 0.1 · (1 + 2 + 3) / 3."""
    logps = torch.tensor([[-1.0, -2.0], [-5.0, -5.0], [-3.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    correct = torch.tensor([True, False, True])
    loss = positive_lm_loss(logps, correct, mask)
    assert loss.item() == pytest.approx(0.2)
    assert reference.positive_lm_loss(logps.detach(), correct, mask) == pytest.approx(0.2)
    loss.backward()
    np.testing.assert_allclose(logps.grad, -0.1 / 3 * np.array([[1, 1], [0, 0], [1, 0]]), rtol=1e-6)
    nothing = positive_lm_loss(logps, torch.zeros(3).bool(), mask)
    assert nothing.item() == 0
    nothing.backward()
    assert positive_lm_loss(logps, correct, mask, weight=1, denominator=12).item() == pytest.approx(0.5)


@QUICK
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.0, 0.1, 1.0]))
def test_torch_equals_numpy_and_micro_batches_add_up(seed, clip):
    rng = np.random.default_rng(seed)
    values, old, targets = rng.normal(0, 1, (3, 4, 6))
    mask = rng.random((4, 6)) < 0.7
    mask[0, 0] = True
    correct = rng.random(4) < 0.5
    tensors = [torch.tensor(array) for array in (values, old, targets, mask)]
    whole = value_loss(*tensors, clip=clip).item()
    assert whole == pytest.approx(reference.value_loss(values, old, targets, mask, clip=clip), rel=1e-5)
    halves = ([tensor[rows] for tensor in tensors] for rows in (slice(0, 1), slice(1, None)))
    assert sum(value_loss(*half, clip=clip, denominator=mask.sum()).item() for half in halves) == pytest.approx(whole)
    explained = explained_variance(tensors[0], tensors[2], tensors[3]).item()
    assert explained == pytest.approx(reference.explained_variance(values, targets, mask), rel=1e-4, nan_ok=True)
    tokens = float((mask & correct[:, None]).sum())
    logps, right = -tensors[0].abs(), torch.tensor(correct)
    together = positive_lm_loss(logps, right, tensors[3]).item()
    assert together == pytest.approx(reference.positive_lm_loss(logps, correct, mask), rel=1e-5, abs=1e-9)
    if tokens:
        parts = [
            positive_lm_loss(logps[rows], right[rows], tensors[3][rows], denominator=tokens).item()
            for rows in (slice(0, 2), slice(2, None))
        ]
        assert sum(parts) == pytest.approx(together, rel=1e-5, abs=1e-7)
