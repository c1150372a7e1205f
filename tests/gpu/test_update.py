"""The update on a GPU: the ragged kernel and the chunked head against the model's own computation, and the memory."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import random

from support import small_model, train_sample
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.models.chunked_lm_head import token_logps
from dapo_rl.models.response_logps import ResponseLogps
from dapo_rl.train.policy import HFPolicy

pytestmark = pytest.mark.gpu


def samples_of(prompts, group, prompt_tokens, tokens, vocabulary, ragged=False):
    rng = random.Random(0)
    return [
        train_sample(prompt, response, (-5.0,) * len(response), rng.gauss(0, 1), g)
        for g in range(prompts)
        for prompt in [tuple(rng.randrange(3, vocabulary) for _ in range(prompt_tokens))]
        for response in (
            tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(1, tokens) if ragged else tokens))
            for _ in range(group)
        )
    ]


def gradients(model, samples, **how):
    model.zero_grad()
    with ResponseLogps(model, temperature=0.8, pad_id=0, **how).compute(samples) as stats:
        factor = torch.randn(stats.mask.shape, generator=torch.Generator().manual_seed(1)).cuda()
        torch.where(stats.mask, stats.logps * factor, 0.0).sum().backward()
    return stats.logps[stats.mask], torch.cat([p.grad.flatten() for p in model.parameters()])


def distance(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("recompute", [False, True])
def test_float32_is_exact_and_bfloat16_is_as_close_packed_as_padded(recompute):
    model = small_model(initializer_range=0.1, head_dim=16).cuda()
    samples = samples_of(5, 4, 9, 30, 250, ragged=True)
    exact = gradients(model, samples, packed=False)
    packed = gradients(model, samples, recompute=recompute)
    assert distance(packed[0], exact[0]) < 1e-5
    assert distance(packed[1], exact[1]) < 1e-4
    padded, ragged = (
        gradients(model, samples, packed=p, recompute=recompute, dtype=torch.bfloat16) for p in (False, True)
    )
    for ours, theirs, reference in zip(ragged, padded, exact, strict=True):
        assert 1e-5 < distance(ours, reference) < 1.2 * distance(theirs, reference)


@pytest.mark.parametrize("chunk_rows", [7, 64, 1000])
def test_the_head_sums_in_float32(chunk_rows):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64).bfloat16().float().cuda().requires_grad_() for n in (300, 1000))
    targets, factor = torch.randint(1000, (300,)).cuda(), torch.randn(300).cuda()
    exact = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    with torch.autocast("cuda", torch.bfloat16):
        logps, _ = token_logps(hidden, weight, None, targets, chunk_rows=chunk_rows)
    torch.testing.assert_close(logps, exact, atol=1e-4, rtol=1e-4)
    ours, theirs = (torch.autograd.grad(x, [hidden, weight], factor) for x in (logps, exact))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert distance(a, b) < 0.01


def half_billion(vocabulary=151936):
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize("tokens", [20480])
def test_memory_of_long_samples(tokens, capsys):
    """One sample of the paper's length on Qwen2.5-0.5B's shape: full logits alone would be 12 GB in float32."""
    peaks = {}
    for recompute in (False, True):
        train = TrainSettings(lr=1e-6, gradient_checkpointing=recompute)
        model = half_billion()
        policy = HFPolicy(
            model,
            pad_id=0,
            temperature=1.0,
            algo=AlgoSettings(),
            train=train,
            norm_length=tokens,
            token_budget=tokens,
            dtype=torch.bfloat16,
        )
        samples = samples_of(1, 1, 256, tokens - 256, 151936)
        policy.update(samples, 1e-6)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        policy.update(samples, 1e-6)
        end.record()
        torch.cuda.synchronize()
        peaks[recompute] = torch.cuda.max_memory_allocated() / 2**30
        with capsys.disabled():
            print(
                f"\n{tokens} tokens, gradient_checkpointing={recompute}: peak {peaks[recompute]:.1f} GiB, of which "
                f"{held / 2**30:.1f} weights, gradients and moments; {start.elapsed_time(end) / 1e3:.2f} s"
            )
        del policy, model
    assert peaks[True] < 16
    assert peaks[True] < 0.6 * peaks[False]


def test_a_gpu_that_is_full_halves_the_micro_batch_and_the_update_is_the_same():
    """Memory is capped where the whole batch does not fit and half of it does."""
    samples = samples_of(8, 1, 16, 1008, 1000)

    def policy_of(budget):
        torch.manual_seed(0)
        model = half_billion(vocabulary=1000)
        settings = TrainSettings(lr=1e-6, max_grad_norm=1e9)
        how = {"pad_id": 0, "temperature": 1.0, "algo": AlgoSettings(), "train": settings, "norm_length": 1008}
        return HFPolicy(model, **how, token_budget=budget, dtype=torch.bfloat16)

    def peak_of(budget):
        policy = policy_of(budget)
        policy.update(samples, 0.0)  # the optimizer's moments come with the first step
        torch.cuda.reset_peak_memory_stats()
        update = policy.update(samples, 0.0)
        assert update.notes == ()
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).cpu()
        return torch.cuda.max_memory_allocated(), gradient, update.metrics

    half, expected, expected_metrics = peak_of(4096)
    torch.cuda.empty_cache()
    whole, _, _ = peak_of(8192)
    torch.cuda.empty_cache()
    assert whole > 1.2 * half
    policy = policy_of(8192)
    # Rounding and fragmentation take some of what the allocator is allowed.
    limit = 0.25 * half + 0.75 * whole
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        notes = policy.update(samples, 0.0).notes
        update = policy.update(samples, 0.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (note,) = (*notes, *update.notes)
    assert note.startswith("out of GPU memory: micro-batches now have 4096 tokens instead of 8192; ")
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).cpu()
    assert distance(gradient, expected) < 1e-2
    assert update.metrics["actor/pg_loss"] == pytest.approx(expected_metrics["actor/pg_loss"], rel=1e-3, abs=1e-6)
