"""Samples in a row: log-probabilities, entropies and gradients are those of the model's own padded computation."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import small_model, train_sample

from dapo_rl.errors import UserError
from dapo_rl.models import packing as packed_module
from dapo_rl.models.attention import attending
from dapo_rl.models.packing import pack
from dapo_rl.models.recompute import recomputing
from dapo_rl.models.response_logps import ResponseLogps

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi", "Mistral"]


def model_of(name, architecture="", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | changes))
    return getattr(transformers, architecture or f"{name}ForCausalLM")(config).eval()


def ragged_samples(seed, groups=3, group_size=3):
    """Groups with a prompt in common, a prompt that two groups have, and responses of one token."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(3, 97, rng.integers(1, 9)).tolist()) for _ in range(groups)]
    lengths = rng.integers(1, 12, (groups, group_size)).tolist()
    return [
        train_sample(prompts[g % 2 if g else 0], tuple(rng.integers(3, 97, n).tolist()), 0.0, 0.0, g)
        for g in range(groups)
        for n in lengths[g]
    ]


def responses(model, **how):
    return ResponseLogps(model, temperature=0.8, pad_id=0, **how)


def gradients(model, samples, **how):
    model.zero_grad()
    with responses(model, **how).compute(samples) as stats:
        factor = torch.randn(stats.mask.shape, generator=torch.Generator().manual_seed(1))
        torch.where(stats.mask, stats.logps * factor, 0.0).sum().backward()
    return stats, {name: p.grad for name, p in model.named_parameters()}


def assert_equal_computations(ours, theirs, tolerance=1e-5):
    (stats, gradient), (expected, expected_gradient) = ours, theirs
    assert torch.equal(stats.mask, expected.mask)
    for a, b in ((stats.logps, expected.logps), (stats.entropy, expected.entropy)):
        torch.testing.assert_close(a[stats.mask], b[stats.mask], atol=tolerance, rtol=tolerance)
    largest = max(g.abs().max() for g in expected_gradient.values())
    for name, g in expected_gradient.items():
        torch.testing.assert_close(gradient[name] / largest, g / largest, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_packed_chunked_and_shared_equals_padded_with_full_logits(name, seed):
    model = model_of(name)
    samples = ragged_samples(seed)
    assert responses(model).note is None
    assert_equal_computations(gradients(model, samples), gradients(model, samples, packed=False))


def test_learnt_positions_and_a_fused_projection():
    model = model_of("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=64, architecture="GPT2LMHeadModel")
    samples = ragged_samples(0)
    assert responses(model).note is None
    assert_equal_computations(gradients(model, samples), gradients(model, samples, packed=False))


@pytest.mark.parametrize("name", ["Llama", "Phi"])
def test_a_model_with_heads_of_its_own_and_untied_embeddings(name):
    model = model_of(name, num_key_value_heads=4, tie_word_embeddings=False)
    samples = ragged_samples(0)
    assert_equal_computations(gradients(model, samples), gradients(model, samples, packed=False))


@pytest.mark.parametrize("packed", [True, False])
def test_layers_computed_twice_give_the_same_gradients(packed):
    model = model_of("Qwen3")
    samples = ragged_samples(0)
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    once = gradients(model, samples, packed=packed)
    assert sum(calls) == 1
    again = gradients(model, samples, packed=packed, recompute=True)
    assert sum(calls) == 3
    assert_equal_computations(again, once, tolerance=1e-6)
    assert not any(m.training for m in model.modules())
    assert "forward" not in vars(model.model.layers[0])


def test_layers_keep_their_inputs_alone():
    model = model_of("Llama", num_hidden_layers=6)
    samples = ragged_samples(0)

    def kept(recompute):
        sizes = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x),
            responses(model, recompute=recompute).compute(samples),
        ):
            pass
        return sum(sizes)

    assert kept(True) < 0.3 * kept(False)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match=r"train\.gradient_checkpointing: Linear has no layers"):
        ResponseLogps(torch.nn.Linear(1, 1), temperature=1.0, pad_id=0, recompute=True)


def test_autocast_is_close():
    model = model_of("Llama", initializer_range=0.05)
    samples = ragged_samples(0)
    (stats, ours), (expected, theirs) = (gradients(model, samples, dtype=d) for d in (torch.bfloat16, torch.float32))
    assert 1e-6 < (stats.logps - expected.logps).abs().max() < 0.02
    for name, g in theirs.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - g).norm() < 0.05 * g.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_nothing_is_fused(dtype):
    model, samples = model_of("Llama"), ragged_samples(0)
    assert responses(model, dtype=dtype)._fusion is None
    (_, fused), (_, plain) = (gradients(model, samples, dtype=dtype, fused=f) for f in (True, False))
    assert all(torch.equal(fused[name], plain[name]) for name in plain)


def test_under_autocast_attention_is_in_one_type():
    """Rotation leaves queries and keys in float32, which the kernel for ragged sequences does not take."""
    model = model_of("Llama")
    row, _ = pack([((5, 6, 7), (8, 9))], torch.device("cpu"))
    seen = set()

    def attend(layer, q, k, v, scale):
        seen.update({q.dtype, k.dtype, v.dtype})
        return row(layer, q, k, v, scale)

    with torch.no_grad(), attending(model, attend, 4), torch.autocast("cpu", torch.bfloat16):
        model.model(input_ids=row.input_ids_T[None], position_ids=row.position_ids_T[None], use_cache=False)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Gemma2", {}, "caps its logits"),
        ("Gemma2", {"final_logit_softcapping": None}, "has attention with softcap"),
        ("Granite", {"logits_scaling": 4.0}, "gives different results"),
        ("Cohere", {"logit_scale": 0.25}, "gives different results"),
        ("Mistral", {"sliding_window": 16}, "has a sliding window of 16 tokens in a context of 20"),
        ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]}, ""),
    ],
)
def test_a_model_that_cannot_be_packed_is_padded_and_says_so(name, changes, reason):
    model = model_of(name, **changes)
    samples = ragged_samples(0)
    ours = responses(model, longest=20)
    assert not ours.packed
    assert ours.note.startswith(f"{name}ForCausalLM {reason}")
    assert ours.note.endswith("samples are padded, which is slower and uses more memory")
    assert_equal_computations(gradients(model, samples, longest=20), gradients(model, samples, packed=False))


def test_a_window_that_no_sample_leaves_is_no_window():
    model = model_of("Mistral", sliding_window=20)
    assert responses(model, longest=20).packed


def test_a_prompt_is_computed_once_for_its_group():
    row, predictors = pack([((5, 6, 7), (8, 9)), ((5, 6, 7), (4,)), ((1,), ()), ((5, 6), (7, 8))], torch.device("cpu"))
    assert row.input_ids_T.tolist() == [5, 6, 7, 8, 1, 5, 6, 7]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert predictors.indices.tolist() == [2, 3, 2, 6, 7]
    alone, _ = pack([((5, 6, 7), (8, 9)), ((5, 6, 7), (4,))], torch.device("cpu"), share_prompts=False)
    assert alone.input_ids_T.tolist() == [5, 6, 7, 8, 5, 6, 7]


def test_what_a_ragged_kernel_gets():
    """Queries are each sequence's own tokens, keys all of its tokens: never a query without tokens."""
    row, _ = pack([((5, 6, 7), (8, 9)), ((5, 6, 7), (4,)), ((5, 6, 7), (4, 4, 4))], torch.device("cpu"))
    ragged = row._ragged
    assert ragged.starts_q.tolist() == [0, 4, 6]
    assert ragged.starts_k.tolist() == [0, 4, 9]
    assert ragged.keys.indices.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5]
    assert (ragged.longest_q, row.longest) == (4, 5)


def test_rectangles_have_little_padding():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 300, 60).tolist()
    row, _ = pack([((1,), (1,) * n) for n in lengths], torch.device("cpu"), share_prompts=False)
    blocks = [block.queries for block in row._blocks[0]]
    assert sum(len(b) for b in blocks) == 60
    assert sum(b.numel() for b in blocks) <= sum(lengths) / 0.75
    assert len(blocks) < 10
    assert all(a.shape[1] < b.shape[1] for a, b in pairwise(blocks))


def test_a_shared_prompt_asks_once():
    row, _ = pack([((1, 2, 3, 4, 5, 6), (7,) * 4)] * 8, torch.device("cpu"))
    assert sum(block.queries.numel() for block in row._blocks[0]) == row.tokens == 6 + 8 * 3
    assert [block.mask is None for block in row._blocks[0]] == [True, False]


def test_sequences_too_long_for_a_mask_do_without(monkeypatch):
    sequences = [((5, 6, 7), (8, 9, 10, 11)), ((5, 6, 7), (12, 13)), ((5, 6), (7, 8, 9))]
    q, k, v = (torch.randn(13, heads, 8) for heads in (4, 2, 2))
    row, _ = pack(sequences, torch.device("cpu"))
    expected = row(0, q[: row.tokens], k[: row.tokens], v[: row.tokens], 0.3)
    monkeypatch.setattr(packed_module, "_MASK_ELEMENTS", 1)
    row, _ = pack(sequences, torch.device("cpu"))
    assert all(block.mask is None for block in row._blocks[0])
    torch.testing.assert_close(row(0, q[: row.tokens], k[: row.tokens], v[: row.tokens], 0.3), expected)


def test_the_module_is_as_it_was():
    model = small_model()
    before = model.config._attn_implementation
    gradients(model, [train_sample((5, 6), (7, 8), 0.0, 0.0, 0)])
    assert model.config._attn_implementation == before


def test_recomputing_gives_a_hooked_layer_its_hook_back():
    model = small_model()
    layer = model.model.layers[0]
    hook = layer.forward = partial(layer.forward)
    with recomputing(model):
        assert layer.forward is not hook
    assert layer.forward is hook
    assert "forward" not in vars(model.model.layers[1])


@pytest.mark.parametrize(("recompute", "grad", "cached"), [(0, 1, True), (1, 1, False), (0, 0, False)])
def test_autocast_caches_copies_of_weights_only_if_the_backward_pass_keeps_them_anyway(recompute, grad, cached):
    model, seen = small_model(), []
    model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
        lambda *_: seen.append(torch.is_autocast_cache_enabled())
    )
    ours = responses(model, dtype=torch.bfloat16, recompute=bool(recompute))
    seen.clear()
    with torch.set_grad_enabled(bool(grad)), ours.compute(ragged_samples(0)) as stats:
        if grad:
            stats.logps.sum().backward()
    assert seen == [cached] * (1 + recompute)
