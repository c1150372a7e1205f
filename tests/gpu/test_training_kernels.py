"""The kernels of the update against float64: results and gradients.

On a CUDA GPU, or on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_training_kernels.py`.
"""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("neither a CUDA GPU nor Triton's interpreter", allow_module_level=True)

from dapo_rl.models.chunked_lm_head import token_logps  # noqa: E402
from dapo_rl.models.kernels.gated_mlp import gated_product  # noqa: E402
from dapo_rl.models.kernels.gather import read_rows  # noqa: E402
from dapo_rl.models.kernels.joint_linear import joint_linear  # noqa: E402
from dapo_rl.models.kernels.norm import add_and_norm  # noqa: E402
from dapo_rl.models.kernels.rotary import rotated  # noqa: E402
from dapo_rl.models.kernels.softmax import softmax_pulls, softmax_stats  # noqa: E402
from dapo_rl.models.packing import reads_by_row  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOKENS = 5 if INTERPRETED else 1031
"""Not a multiple of anything, and more than one round of every program."""
F32, BF16 = torch.float32, torch.bfloat16
WIDTHS = {"SmolLM2-135M": 576, "Qwen2.5-1.5B": 1536, "Qwen2.5-7B": 3584, "a head": 128, "odd": 77}


def normal(*shape, dtype=F32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.requires_grad_()


def assert_close(ours, exact):
    """Within a rounding or two of bfloat16, which the interpreter cuts off, or a few of float32."""
    step = 1e-5 if ours.dtype == F32 else 2**-6 if INTERPRETED else 2**-7
    scale = exact.pow(2).mean().sqrt().item()
    torch.testing.assert_close(ours.double(), exact.double(), rtol=step, atol=step * scale / 4)


def check(compute, reference, inputs, types):
    """Compares results and the gradients of a random weighting of them, and repeats the gradients to the bit."""
    results = compute(*inputs)
    assert [r.dtype for r in results] == types
    weights = [normal(*r.shape, dtype=r.dtype, seed=9 + i).detach() for i, r in enumerate(results)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = reference(*exact_inputs)
    for ours, theirs in zip(results, exact, strict=True):
        assert_close(ours, theirs)
    gradients = torch.autograd.grad(results, inputs, weights, retain_graph=True)
    theirs = torch.autograd.grad(exact, exact_inputs, [w.double() for w in weights])
    for x, ours, wanted in zip(inputs, gradients, theirs, strict=True):
        assert ours.dtype == x.dtype
        assert_close(ours, wanted)
    again = torch.autograd.grad(compute(*inputs), inputs, weights)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def exact_norm(x, weight, plus_one, eps=1e-3):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + 1 if plus_one else weight)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("types", [(F32, BF16, F32), (BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, F32)])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_norm_of_a_sum(width, types, plus_one):
    residual, added, weight = types
    inputs = [
        normal(1, TOKENS, width, dtype=residual),
        normal(1, TOKENS, width, dtype=added, seed=1),
        normal(width, dtype=weight, seed=2),
    ]

    def reference(residual, added, weight):
        total = residual + added
        rounded = total + (total.detach().to(torch.promote_types(*types[:2])).double() - total).detach()
        return rounded, exact_norm(rounded, weight, plus_one)

    wide = torch.promote_types(residual, added)
    if INTERPRETED and wide == BF16:
        pytest.skip("the interpreter cuts the sum off instead of rounding it")
    check(lambda r, a, w: add_and_norm(r, a, w, 1e-3, plus_one, BF16), reference, inputs, [wide, BF16])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_norm_alone(width, dtype):
    inputs = [normal(TOKENS, width, dtype=dtype), normal(width, seed=2)]
    check(
        lambda x, w: add_and_norm(x, None, w, 1e-3, False, BF16),
        lambda x, w: (x * 1.0, exact_norm(x, w, False)),
        inputs,
        [dtype, BF16],
    )
    check(  # only the norm is used
        lambda x, w: add_and_norm(x, None, w, 1e-3, False, F32)[1:],
        lambda x, w: (exact_norm(x, w, False),),
        inputs,
        [F32],
    )


def test_the_sum_alone_passes_its_gradient_on():
    x, y, weight = normal(3, 64), normal(3, 64, dtype=BF16, seed=1), normal(64, seed=2)
    total, _ = add_and_norm(x, y, weight, 1e-3, False, BF16)
    gradients = torch.autograd.grad(total.sum(), [x, y, weight], allow_unused=True)
    assert torch.equal(gradients[0], torch.ones_like(x))
    assert torch.equal(gradients[1], torch.ones_like(y))
    assert gradients[2] is None


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1536, 8960, 18944, 77])
def test_the_gated_product(inner, kind, joint):
    act = F.silu if kind == "silu" else (lambda x: F.gelu(x, approximate="tanh"))
    if joint:
        inputs = [normal(2, 3, 2 * inner, dtype=BF16)]
        ours, theirs = (
            lambda x: (gated_product(x, None, kind),),
            lambda x: (act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],),
        )
    else:
        inputs = [normal(2, 3, inner, dtype=BF16, seed=s) for s in (0, 1)]
        ours, theirs = (lambda g, u: (gated_product(g, u, kind),)), (lambda g, u: (act(g) * u,))
    check(ours, theirs, inputs, [BF16])


def test_the_gated_product_of_large_numbers_is_finite():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    for kind, act in (("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))):
        out = gated_product(gate, up, kind)
        torch.testing.assert_close(out, act(gate))
        ours, theirs = (torch.autograd.grad(y.sum(), [gate, up]) for y in (out, act(gate) * up))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "part"),
    [(9, 3, 64, 64), (12, 2, 128, 128), (28, 4, 128, 128), (3, 1, 20, 20), (4, 2, 80, 32), (2, 2, 24, 12)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_rotary_embedding(heads, key_heads, width, part, dtype):
    T = min(TOKENS, 33)
    inputs = [normal(1, T, n, width, dtype=dtype, seed=n) for n in (heads, key_heads)]
    cos, sin = (normal(1, T, part, seed=s).detach() for s in (3, 4))

    def reference(q, k):
        c, s = cos.double()[:, None], sin.double()[:, None]

        def turned(x):
            x = x.transpose(1, 2)
            turns, rest = x[..., :part], x[..., part:]
            half = torch.cat((-turns[..., part // 2 :], turns[..., : part // 2]), -1)
            return torch.cat((turns * c + half * s, rest), -1)

        return turned(q), turned(k)

    def ours(q, k):
        out = rotated(q.transpose(1, 2), k.transpose(1, 2), cos, sin, BF16)
        assert all(x[0].transpose(0, 1).is_contiguous() for x in out)
        return out

    check(ours, reference, inputs, [BF16, BF16])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gradient_of_a_row_is_the_sum_over_its_reads(dtype):
    rng = np.random.default_rng(0)
    indices = np.concatenate([rng.integers(0, 40, 150), [41] * 70])
    x = normal(43, 300, dtype=dtype)
    places = torch.from_numpy(indices).to(DEVICE)
    lists = [torch.from_numpy(a).to(DEVICE) for a in reads_by_row(indices, 43)]
    check(lambda x: (read_rows(x, places, *lists),), lambda x: (x[places],), [x], [dtype])


@pytest.mark.parametrize("has_bias", [False, True])
def test_joint_linear_layers(has_bias):
    sizes = (64, 16, 24)
    x = normal(1, 37, 48, dtype=BF16)
    weights = [normal(n, 48, seed=n) for n in sizes]
    biases = [normal(n, seed=n + 1) for n in sizes if has_bias]
    inputs = [x, *weights, *biases]
    out = joint_linear(x, weights, biases, BF16)
    # The layers compute with weights rounded to bfloat16.
    exact_inputs = [i.detach().bfloat16().double().requires_grad_() for i in inputs]
    exact = exact_inputs[0] @ torch.cat(exact_inputs[1:4]).T + (torch.cat(exact_inputs[4:]) if has_bias else 0.0)
    assert_close(out, exact)
    factor = normal(*out.shape, dtype=BF16, seed=9).detach()
    ours, theirs = torch.autograd.grad(out, inputs, factor), torch.autograd.grad(exact, exact_inputs, factor.double())
    for x, a, b in zip(inputs, ours, theirs, strict=True):
        assert a.dtype == x.dtype
        # Float32 gradients are sums that were never rounded to bfloat16, except in the interpreter's products.
        tolerance = 1e-6 if a.dtype == F32 and not (INTERPRETED and a.dim() == 2) else 0.01
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_joint_linear_layers_with_frozen_weights():
    x, first, second = normal(5, 8, dtype=BF16), normal(4, 8).detach(), normal(6, 8, seed=1)
    joint_linear(x, [first, second], [], BF16).sum().backward()
    assert first.grad is None
    torch.testing.assert_close(second.grad, x.detach().float().sum(0).expand(6, 8), rtol=0.01, atol=0.05)


def exact_stats(logits, targets):
    logps = logits.double().log_softmax(-1)
    entropy = -(logps.exp() * torch.where(logps.isinf(), 0, logps)).sum(-1)
    return logps.gather(-1, targets[:, None])[:, 0], entropy, logits.double().logsumexp(-1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("vocabulary", [49152, 151936, 5003, 17])
def test_log_probabilities_and_entropies(vocabulary, scale):
    rows = 3 if INTERPRETED else 300
    logits = (normal(rows, vocabulary) * scale).detach()
    logits[1] += 1000
    logits[2, ::2] = -torch.inf
    targets = torch.randint(vocabulary // 2, (rows,)).to(DEVICE) * 2 + 1
    exact = exact_stats(logits, targets)
    stats = softmax_stats(logits, targets)
    for ours, theirs in zip(stats, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=2e-5 if scale == 0.1 else 1e-4)
    for dtype in (F32, BF16):
        pulls = torch.empty(logits.shape, dtype=dtype, device=DEVICE)
        softmax_pulls(logits, targets, stats[0], stats[2], pulls)
        expected = logits.double().softmax(-1)
        expected[torch.arange(rows), targets] = torch.expm1(exact[0])
        torch.testing.assert_close(pulls.double(), expected, rtol=2e-4 if dtype == F32 else 2**-7, atol=1e-7)


def test_a_logit_that_is_no_number_is_not_hidden():
    logits = normal(3, 100).detach()
    logits[0, 7], logits[1, 50] = torch.nan, torch.inf
    logps, entropy, log_sums = softmax_stats(logits, torch.tensor([1, 2, 3], device=DEVICE))
    for x in (logps, entropy, log_sums):
        assert x.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("vocabulary", [61, 2500])
def test_the_fused_softmax_of_kept_tokens(vocabulary):
    """Against the operations one by one; of every third token nothing is kept."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=random).to(DEVICE).requires_grad_() for n in (TOKENS, vocabulary))
    targets = torch.randint(vocabulary, (TOKENS,), generator=random)
    kept = torch.cat([targets[:, None], torch.randint(-1, vocabulary, (TOKENS, 4), generator=random)], 1).int()
    kept[::3] = -1
    targets, kept, factor = targets.to(DEVICE), kept.to(DEVICE), torch.randn(TOKENS, generator=random).to(DEVICE)
    results = []
    for fused in (True, False):
        logps, entropy = token_logps(hidden, weight, None, targets, chunk_rows=3, fused=fused, kept_TK=kept)
        gradients = torch.autograd.grad(logps @ factor, [hidden, weight])
        results.append((logps.detach(), entropy.detach(), *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (results[0][0][::3] == 0).all()
