"""Linear layers with the same input as one product."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dapo_rl.models.kernels.joint_linear import joint_linear


def parameters(dtype, biased):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(m, 8, generator=generator).to(dtype).requires_grad_() for m in (6, 2, 4)]
    biases = [torch.randn(m, generator=generator).to(dtype).requires_grad_() for m in (6, 2, 4)] if biased else []
    return weights, biases


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_results_and_gradients_are_those_of_the_layers(count, biased):
    weights, biases = parameters(torch.float64, biased)
    weights, biases = weights[:count], biases[:count]
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases or [None] * count, strict=True)], dim=-1)
    factor = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    of = [x, *weights, *biases]
    wanted = torch.autograd.grad(expected, of, factor)
    result = joint_linear(x, weights, biases, torch.float64)
    torch.testing.assert_close(result, expected)
    # The gradient of a bias is summed in float32.
    torch.testing.assert_close(torch.autograd.grad(result, of, factor), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_weights_in_the_type_of_the_product_are_kept_as_they_are(dtype, kept):
    """A copy of sharded weights would keep them whole until the backward pass."""
    weights, _ = parameters(dtype, False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        joint_linear(torch.randn(5, 8), weights, [], torch.bfloat16)
    own = {weight.data_ptr() for weight in weights}
    assert len(saved) == 1 + kept  # the input
    assert all(x.data_ptr() in own for x in saved[1:]) == (dtype == torch.bfloat16)
