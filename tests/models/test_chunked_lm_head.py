"""The chunked head: what full logits give, for any chunk size, without ever making them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dapo_rl.algo import entropy_from_logits
from dapo_rl.models import chunked_lm_head
from dapo_rl.models.chunked_lm_head import token_logps


def head(tokens=23, vocabulary=61, width=12, bias=True, seed=0):
    random = torch.Generator().manual_seed(seed)
    hidden, weight, shift = (
        torch.randn(shape, generator=random).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    return hidden, weight, shift if bias else None, targets, torch.randn(tokens, generator=random)


def plain(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1), entropy_from_logits(logits)


class Operations(TorchDispatchMode):
    """Counts products of matrices, and the elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.products = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.booleans(), st.sampled_from([1.0, 0.6]), st.integers(0, 99))
def test_values_and_gradients_are_those_of_full_logits_for_any_chunk(tokens, rows, bias, temperature, seed):
    hidden, weight, shift, targets, factor = head(tokens, bias=bias, seed=seed)
    inputs = [x for x in (hidden, weight, shift) if x is not None]
    logps, entropy = token_logps(hidden, weight, shift, targets, temperature, chunk_rows=rows)
    expected, expected_entropy = plain(hidden, weight, shift, targets, temperature)
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(logps, inputs, factor, retain_graph=True),
        torch.autograd.grad(expected, inputs, factor, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weighted, expected_weighted = entropy @ factor.flip(0), expected_entropy @ factor.flip(0)
    for other, expected_other in ((0.0, 0.0), (logps @ factor, expected @ factor)):  # alone, and beside the other
        for ours, theirs in zip(
            torch.autograd.grad(weighted + other, inputs, retain_graph=True),
            torch.autograd.grad(expected_weighted + expected_other, inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 2)])
def test_what_is_frozen_has_no_gradient(frozen):
    hidden, weight, bias, targets, factor = head()
    inputs = [hidden, weight, bias]
    for i in frozen:
        inputs[i].requires_grad_(False)
    trained = [x for x in inputs if x.requires_grad]
    expected = torch.autograd.grad(plain(hidden, weight, bias, targets, 1.0)[0], trained, factor)
    logps, _ = token_logps(hidden, weight, bias, targets, chunk_rows=23)
    with Operations() as operations:
        (logps * factor).sum().backward()
    assert all(inputs[i].grad is None for i in frozen)
    assert operations.products == sum(x.requires_grad for x in (hidden, weight)), "a product that nobody asked for"
    for x, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=1e-5, rtol=1e-5)


def test_without_gradients_nothing_waits():
    hidden, weight, bias, targets, _ = head()
    with torch.no_grad():
        logps, _ = token_logps(hidden, weight, bias, targets, chunk_rows=7)
    assert not logps.requires_grad


def test_autocast_is_close_and_gradients_stay_float32():
    hidden, weight, bias, targets, factor = head(width=64)
    weight = (weight.detach() / 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logps, _ = token_logps(hidden, weight, bias, targets, chunk_rows=5)
    expected, _ = plain(hidden, weight, bias, targets, 1.0)
    assert logps.dtype == torch.float32
    assert 1e-4 < (logps - expected).abs().max() < 0.03
    ours, theirs = (torch.autograd.grad(x, [hidden, weight, bias], factor) for x in (logps, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


def test_a_token_that_is_almost_certain_keeps_its_gradient_in_bfloat16():
    """1 − p is 1e-4 here, which bfloat16 cannot tell from 0 beside 1."""
    weight = torch.eye(2).requires_grad_()
    hidden = torch.tensor([[9.25, 0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logps, _ = token_logps(hidden, weight, None, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(logps, hidden, torch.ones(1))
    expected = 1 - torch.sigmoid(torch.tensor(9.25, dtype=torch.float64)).float()
    torch.testing.assert_close(gradient, torch.stack([expected, -expected])[None], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("vocabulary", [1000, 4000, 16000])
def test_no_tensor_grows_with_tokens_times_vocabulary(vocabulary, monkeypatch):
    budget = 40_000
    monkeypatch.setitem(chunked_lm_head.CHUNK_ELEMENTS, "cpu", budget)
    hidden, weight, _, targets, factor = head(tokens=500, vocabulary=vocabulary, width=2, bias=False)
    with Operations() as made:
        logps, _ = token_logps(hidden, weight, None, targets)
        logps.backward(factor)
    assert made.elements <= max(budget, weight.numel())
    with Operations() as made:
        plain(hidden, weight, None, targets, 1.0)
    assert made.elements == 500 * vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_within_a_chunk_change_nothing(dtype, monkeypatch):
    hidden, weight, bias, targets, factor = head(tokens=50)
    results = []
    for rows in (50, 7, 1):
        monkeypatch.setitem(chunked_lm_head.SLICE_ELEMENTS, "cpu", rows * len(weight))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logps, entropy = token_logps(hidden, weight, bias, targets, chunk_rows=20)
        results.append([logps, entropy, *torch.autograd.grad(logps, [hidden, weight, bias], factor)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)
