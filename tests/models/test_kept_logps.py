"""Log-probabilities over the tokens that truncation kept: values, gradients, and the tokens of an environment."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import train_sample
from test_chunked_lm_head import Operations, head
from test_response_logps import assert_equal_computations, gradients, model_of, ragged_samples

from dapo_rl.algo import entropy_from_logits
from dapo_rl.models import chunked_lm_head
from dapo_rl.models.chunked_lm_head import token_logps
from dapo_rl.models.response_logps import response_logps
from dapo_rl.objectives import numpy_twin_tokens


def some_kept(targets, vocabulary, width, seed=0, empty=()):
    """Up to `width` ids of each row, its target among them; none in the rows `empty`."""
    rng = np.random.default_rng(seed)
    kept = np.full((len(targets), width), -1, np.int32)
    for row, target in enumerate(targets):
        others = [i for i in rng.permutation(vocabulary) if i != target][: rng.integers(0, width)]
        kept[row, : len(others) + 1] = rng.permutation([target, *others])
    kept[list(empty)] = -1
    return torch.from_numpy(kept)


def plain(hidden, weight, bias, targets, temperature, kept):
    """By autograd: the softmax of the kept logits, gathered."""
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    rows = []
    for row, ids, target in zip(logits, kept.tolist(), targets.tolist(), strict=True):
        ids = [i for i in ids if i >= 0]
        if ids:
            chosen = row[ids]
            rows.append(torch.stack([row[target] - chosen.logsumexp(0), entropy_from_logits(chosen)]))
        else:
            rows.append(torch.zeros(2))
    return torch.stack(rows).T


def test_values_worked_out_by_hand():
    """Odds of 4, 3, 2 and 1, of which the first two are kept: 4/7 and 3/7."""
    weight = torch.tensor([[4.0], [3.0], [2.0], [1.0]]).log()
    hidden, targets = torch.ones(3, 1), torch.tensor([0, 1, 2])
    kept = torch.tensor([[0, 1, -1], [1, 0, -1], [-1, -1, -1]], dtype=torch.int32)
    logps, entropy = token_logps(hidden, weight, None, targets, kept_TK=kept)
    h = -(4 / 7 * math.log(4 / 7) + 3 / 7 * math.log(3 / 7))
    torch.testing.assert_close(logps, torch.tensor([math.log(4 / 7), math.log(3 / 7), 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([h, h, 0.0]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.booleans(), st.sampled_from([1.0, 0.6]), st.integers(1, 70),
       st.integers(0, 99))  # fmt: skip
def test_values_and_gradients_are_those_of_autograd_for_any_chunk(tokens, rows, bias, temperature, width, seed):
    hidden, weight, shift, targets, factor = head(tokens, bias=bias, seed=seed)
    inputs = [x for x in (hidden, weight, shift) if x is not None]
    kept = some_kept(targets.tolist(), len(weight), width, seed, empty=range(0, tokens, 5))
    ours = token_logps(hidden, weight, shift, targets, temperature, chunk_rows=rows, kept_TK=kept)
    theirs = plain(hidden, weight, shift, targets, temperature, kept)
    logits = torch.nn.functional.linear(hidden, weight, shift).detach().double().numpy() / temperature
    for mine, other, twin in zip(ours, theirs, numpy_twin_tokens.kept_logps(logits, targets, kept), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(mine.detach(), twin, atol=1e-5)
    losses = [(logps @ factor, entropy @ factor.flip(0)) for logps, entropy in (ours, theirs)]
    for of_logps, of_entropy in ((1, 0), (0, 1), (1, 1)):
        both = [of_logps * logps + of_entropy * entropy for logps, entropy in losses]
        if not theirs.requires_grad:  # nothing is kept of its only row
            continue
        grads = [torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True) for loss in both]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


def test_a_row_without_kept_ids_is_0_without_a_gradient_and_never_nan():
    hidden, weight, bias, targets, _ = head(tokens=4)
    kept = torch.full((4, 3), -1, dtype=torch.int32)
    for scale in (1.0, 1e4):
        stats = token_logps(hidden * scale, weight, bias, targets, kept_TK=kept)
        assert all((x == 0).all() for x in stats)
        for gradient in torch.autograd.grad(stats[0].sum() + stats[1].sum(), [hidden, weight, bias]):
            assert (gradient == 0).all()


def test_all_tokens_kept_is_the_whole_softmax():
    hidden, weight, bias, targets, _ = head()
    every = torch.arange(len(weight), dtype=torch.int32).expand(len(targets), -1)
    for ours, theirs in zip(
        token_logps(hidden, weight, bias, targets, kept_TK=every),
        token_logps(hidden, weight, bias, targets),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("vocabulary", [1000, 4000])
def test_no_tensor_grows_with_tokens_times_vocabulary(vocabulary, monkeypatch):
    budget = 40_000
    monkeypatch.setitem(chunked_lm_head.CHUNK_ELEMENTS, "cpu", budget)
    hidden, weight, _, targets, factor = head(tokens=500, vocabulary=vocabulary, width=2, bias=False)
    kept = some_kept(targets.tolist(), vocabulary, 8)
    with Operations() as made:
        logps, _ = token_logps(hidden, weight, None, targets, kept_TK=kept)
        logps.backward(factor)
    assert made.elements <= budget


def episodes(seed=0, width=6):
    """Samples with tokens of an environment, of which nothing is kept."""
    rng = np.random.default_rng(seed)
    result = []
    for sample in ragged_samples(seed):
        written = rng.random(len(sample.token_ids)) < 0.7
        kept = some_kept(sample.token_ids.tolist(), 97, width, seed, np.flatnonzero(~written)).numpy()
        result.append(sample.replace(mask=written, kept_ids=kept))
    return result


@pytest.mark.parametrize("how", [{}, {"entropy_grad": True}, {"recompute": True}])
def test_packed_is_padded(how):
    model, samples = model_of("Llama"), episodes()
    ours, theirs = gradients(model, samples, **how), gradients(model, samples, packed=False, **how)
    assert_equal_computations(ours, theirs)
    other, _ = gradients(model, [sample.replace(kept_ids=None) for sample in samples])
    logps = ours[0].logps
    for row, sample in enumerate(samples):
        count = len(sample.token_ids)
        assert (logps[row, :count] > other.logps[row, :count])[sample.mask].all(), "a part of the tokens is likelier"
        assert (logps[row, :count][~sample.mask] == 0).all()


def test_padded_is_the_twin():
    model, samples = model_of("Llama"), episodes()
    with torch.no_grad():
        stats = response_logps(model, samples, 0.7, 0)
        for row, sample in enumerate(samples):
            ids, start = torch.tensor([[*sample.prompt_ids, *sample.token_ids]]), len(sample.prompt_ids)
            logits = model(ids).logits[0, start - 1 : -1].double().numpy() / 0.7
            twin = numpy_twin_tokens.kept_logps(logits, sample.token_ids, sample["kept_ids"])
            for ours, theirs in zip(stats[:2], twin, strict=True):
                np.testing.assert_allclose(ours[row, : len(sample.token_ids)], theirs, atol=1e-5)


def test_samples_that_disagree_are_refused():
    kept = train_sample([1, 2], [3], 0.0, 0.0, kept_ids=[[3, 4]])
    with pytest.raises(ValueError, match="some samples have kept_ids, and some do not"):
        response_logps(model_of("Llama"), [kept, train_sample([1, 2], [3], 0.0, 0.0)], 1.0, 0)
