"""What holds for any numbers: two forms of one function, torch equals NumPy, splitting, permuting, masking."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.algo import clip_fractions, dapo_policy_loss, reference

AGGREGATIONS = ["token-mean", "token-mean-per-group", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
QUICK = settings(max_examples=60, deadline=None)


@st.composite
def batches(draw, min_samples=1):
    """Random log-probabilities, advantages, response lengths and groups; some samples are masked whole."""
    samples, width = draw(st.integers(min_samples, 8)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.05, 0.4, 2.0]))
    old = rng.normal(-2, 1, (samples, width))
    mask = np.arange(width) < rng.integers(0, width + 1, samples)[:, None]
    if not mask.any():
        mask[0, 0] = True
    return {
        "new": old + rng.normal(0, spread, old.shape),
        "old": old,
        "advantages": rng.normal(0, 1, samples) * (rng.random(samples) > 0.1),
        "mask": mask,
        "groups": np.sort(rng.integers(0, 3, samples)),
    }


def in_torch(batch, rows=slice(None), aggregation="token-mean", **changes):
    """The loss of some rows of a batch, with the counts of the whole batch, and its gradient by new_logps."""
    tokens = batch["mask"].sum(1)
    group_tokens = np.array([tokens[batch["groups"] == g].sum() for g in batch["groups"]])
    samples = int((tokens > 0).sum())
    counts = {
        "token-mean": int(tokens.sum()),
        "token-mean-per-group": len({g for g, t in zip(batch["groups"], tokens, strict=True) if t}),
        "seq-mean-token-mean": samples,
        "seq-mean-token-sum-norm": samples,
    }
    new = torch.tensor(batch["new"][rows], dtype=torch.float64, requires_grad=True)
    loss = dapo_policy_loss(
        new,
        torch.tensor(batch["old"][rows]),
        torch.tensor(batch["advantages"][rows]),
        torch.tensor(batch["mask"][rows]),
        aggregation=aggregation,
        denominator=counts[aggregation],
        group_tokens=torch.tensor(group_tokens[rows]),
        norm_length=13,
        **changes,
    )
    loss.backward()
    return loss.item(), new.grad.numpy()


@QUICK
@given(batches(), st.floats(0, 0.9), st.floats(0, 0.9))
def test_both_forms_of_the_objective_are_one_function(batch, low, high):
    """min(r·A, clip(r)·A) is min(r, 1 + high)·A where A ≥ 0, and max(r, 1 − low)·A where A < 0."""
    ratio, advantage = np.exp(batch["new"] - batch["old"]), batch["advantages"][:, None]
    one_sided = np.where(
        advantage >= 0, np.minimum(ratio, 1 + high) * advantage, np.maximum(ratio, 1 - low) * advantage
    )
    two_sided = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    np.testing.assert_allclose(one_sided, two_sided, rtol=1e-12)
    loss, _ = in_torch(batch, clip_low=low, clip_high=high)
    assert loss == pytest.approx(-one_sided[batch["mask"]].mean(), rel=1e-5, abs=1e-5)


@QUICK
@given(batches(), st.sampled_from([*AGGREGATIONS, "micro-batch-token-mean"]), st.sampled_from([None, 1.5, 3.0]))
def test_torch_equals_numpy(batch, aggregation, clip_ratio_c):
    arrays = batch["new"], batch["old"], batch["advantages"], batch["mask"]
    tensors = [torch.tensor(a) for a in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = dapo_policy_loss(*tensors, aggregation=aggregation, clip_ratio_c=clip_ratio_c).item()
    assert ours == pytest.approx(
        reference.dapo_policy_loss(*arrays, aggregation=aggregation, clip_ratio_c=clip_ratio_c), rel=1e-4, abs=1e-5
    )
    assert [f.item() for f in clip_fractions(*tensors, clip_ratio_c=clip_ratio_c)] == pytest.approx(
        reference.clip_fractions(*arrays, clip_ratio_c=clip_ratio_c)
    )


@QUICK
@given(batches(min_samples=2), st.sampled_from(AGGREGATIONS), st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(batch, aggregation, data):
    samples = len(batch["new"])
    cuts = sorted(data.draw(st.sets(st.integers(1, samples - 1), min_size=1)))
    whole_loss, whole_gradient = in_torch(batch, aggregation=aggregation)
    parts = [in_torch(batch, slice(a, b), aggregation) for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), whole_gradient, rtol=1e-5, atol=1e-7)


def test_micro_batch_token_mean_does_depend_on_the_split():
    """Trap 3, fallen into on purpose: a token of a short micro-batch counts more."""
    new, old = torch.tensor([[0.1, 0.1, 0.1], [0.3, 0.0, 0.0]]), torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    ones = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = dapo_policy_loss(new, old, ones, mask, aggregation="micro-batch-token-mean")
        parts = [
            dapo_policy_loss(
                new[i : i + 1], old[i : i + 1], ones[:1], mask[i : i + 1],
                aggregation="micro-batch-token-mean", denominator=2,
            )
            for i in range(2)
        ]  # fmt: skip
    assert abs(sum(parts) - whole) > 0.01


@QUICK
@given(batches(), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_permuting_samples_changes_nothing(batch, aggregation, random):
    order = list(range(len(batch["new"])))
    random.shuffle(order)
    loss, gradient = in_torch(batch, aggregation=aggregation)
    shuffled = {name: values[order] for name, values in batch.items()}
    permuted_loss, permuted_gradient = in_torch(shuffled, aggregation=aggregation)
    assert permuted_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(permuted_gradient, gradient[order], rtol=1e-5, atol=1e-7)


@QUICK
@given(batches(), st.sampled_from(AGGREGATIONS), st.sampled_from([0.0, -50.0, float("nan"), float("-inf")]))
def test_a_masked_sample_changes_neither_loss_nor_gradient(batch, aggregation, garbage):
    """Trap 4: it leaves the denominator too, and whatever stands in it cannot leak."""
    width = batch["new"].shape[1]
    more = {
        "new": np.vstack([batch["new"], np.full((1, width), garbage)]),
        "old": np.vstack([batch["old"], np.full((1, width), garbage)]),
        "advantages": np.append(batch["advantages"], 7.0),
        "mask": np.vstack([batch["mask"], np.zeros((1, width), bool)]),
        "groups": np.append(batch["groups"], batch["groups"][-1]),
    }
    tensors = [[torch.tensor(b[k]) for k in ("new", "old", "advantages", "mask")] for b in (batch, more)]
    for given_tensors in tensors:
        given_tensors[0].requires_grad_()
    losses = [dapo_policy_loss(*t, aggregation=aggregation, norm_length=13) for t in tensors]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6, abs=1e-7)
    np.testing.assert_allclose(tensors[1][0].grad[:-1], tensors[0][0].grad, rtol=1e-6)
    assert tensors[1][0].grad[-1].abs().sum() == 0
