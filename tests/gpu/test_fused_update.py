"""A whole update on a GPU with and without `train.fused`: the same gradients up to rounding."""

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from support import train_sample
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.models.chunked_lm_head import token_logps
from dapo_rl.models.response_logps import ResponseLogps
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.gpu
VOCABULARY = 32000


def shallow_model():
    """Four layers of Qwen2.5-1.5B's shape, with a smaller vocabulary."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).eval()


def grouped_samples(prompts=6, group=4, longest=200):
    rng = random.Random(0)

    def tokens(n):
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(n))

    return [
        train_sample(prompt, tokens(rng.randint(1, longest)), -10.0, rng.gauss(0, 1), g)
        for g, prompt in enumerate(tokens(37) for _ in range(prompts))
        for _ in range(group)
    ]


def updated(budget=2048, lr=1e-4, longest=200, dtype=torch.bfloat16, **train):
    """The gradient, the metrics and the weights after an update of several micro-batches."""
    settings = TrainSettings(max_grad_norm=1e9, **train)
    policy = HFPolicy(
        shallow_model(),
        pad_id=0,
        temperature=0.9,
        # Rounding would decide whether a token at a clipping bound has a gradient.
        algo=AlgoSettings(clip_low=0.99, clip_high=1e3),
        train=settings,
        norm_length=200,
        token_budget=budget,
        dtype=dtype,
    )
    update = policy.update(grouped_samples(longest=longest), lr)
    parameters = list(policy.model.parameters())
    assert not any("forward" in vars(module) for module in policy.model.modules())
    gradient, weights = (torch.cat([x.flatten() for x in y]) for y in ([p.grad for p in parameters], parameters))
    return gradient, weights.detach(), update.metrics


@pytest.mark.parametrize("recompute", [False, True])
def test_fused_or_not_the_gradient_is_as_close_to_that_of_float32(recompute):
    exact = updated(dtype=torch.float32)[0].double()
    fused, _, metrics = updated(fused=True, gradient_checkpointing=recompute)
    plain, _, expected = updated(fused=False, gradient_checkpointing=recompute)
    error, usual = ((gradient.double() - exact).norm() / exact.norm() for gradient in (fused, plain))
    print(f"\nerror of the gradient: {error:.2%} fused, {usual:.2%} not")
    assert error < 1.1 * usual
    assert usual < 0.05
    assert fused.norm().item() == pytest.approx(exact.norm().item(), rel=0.005)
    for name in ("actor/entropy", "actor/prob", "actor/ppo_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=0.01), name


@pytest.mark.parametrize("fused", [True, False])
def test_the_same_update_twice_gives_the_same_bits(fused):
    """Samples of up to 117 tokens: beyond 128, flash attention adds the gradients of queries in any order."""
    first, second = (updated(fused=fused, longest=80, budget=600) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]


def test_micro_batches_do_not_change_the_gradient():
    whole, _, _ = updated(budget=100_000)
    split, _, _ = updated(budget=1000)
    assert torch.cosine_similarity(whole.double(), split.double(), dim=0) > 0.999


def test_all_of_qwen2_is_fused():
    responses = ResponseLogps(shallow_model(), temperature=1.0, pad_id=0, dtype=torch.bfloat16)
    assert responses._fusion.counts == {"norm": 9, "layer": 4, "rotary embedding": 4, "MLP": 4, "projection": 12}
    assert not responses._fusion.left
    for how in ({"fused": False, "dtype": torch.bfloat16}, {"dtype": torch.float32}):
        assert ResponseLogps(shallow_model(), temperature=1.0, pad_id=0, **how)._fusion is None


def test_between_micro_batches_the_host_does_not_wait():
    """After the first update, whose kernels are compiled, a forward and backward pass needs no synchronisation."""
    model, samples = shallow_model(), grouped_samples()
    responses = ResponseLogps(model, temperature=1.0, pad_id=0, dtype=torch.bfloat16)

    def forward_and_backward():
        with responses.compute(samples) as stats:
            torch.where(stats.mask, stats.logps, 0.0).sum().backward()

    forward_and_backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("chunk_rows", [7, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_head_is_the_head(chunk_rows, temperature):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64).bfloat16().float().cuda().requires_grad_() for n in (300, 5000))
    bias = torch.randn(5000, device="cuda", requires_grad=True)
    targets, factor = torch.randint(5000, (300,)).cuda(), torch.randn(300).cuda()
    logits = (hidden.double() @ weight.double().T + bias.double()) / temperature
    exact = logits.log_softmax(-1)
    with torch.autocast("cuda", torch.bfloat16):
        logps, entropy = token_logps(hidden, weight, bias, targets, temperature, chunk_rows, fused=True)
    torch.testing.assert_close(logps.double(), exact.gather(-1, targets[:, None])[:, 0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-4, rtol=1e-5)
    inputs = [hidden, weight, bias]
    ours = torch.autograd.grad(logps, inputs, factor)
    theirs = torch.autograd.grad(exact.gather(-1, targets[:, None])[:, 0], inputs, factor.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()
