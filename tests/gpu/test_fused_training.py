"""Whole models with the kernels of the update in them: results, gradients, and what is left alone.

On a CUDA GPU, or on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_fused_training.py`.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("neither a CUDA GPU nor Triton's interpreter", allow_module_level=True)

from support import train_sample  # noqa: E402

from dapo_rl.cluster.fsdp import ShardedLogps  # noqa: E402
from dapo_rl.models.kernels.fuse_training import TrainingFusion  # noqa: E402
from dapo_rl.models.recompute import recomputing  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EVERYTHING = {"norm": 5, "layer": 2, "rotary embedding": 2, "MLP": 2, "projection": 6}
"""Of two layers: projections are queries, keys and values together, the attention's output, and the MLP's output."""

SAMPLES = [train_sample([5, 6, 7], np.arange(8, 8 + n), -4.0, 1.0, group=0) for n in (3, 11, 20)]


def model_of(name, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(DEVICE, dtype)


def fusion_of(model):
    return TrainingFusion(model, DEVICE, torch.bfloat16)


def computed(model, *contexts, autocast=True):
    """Logits and gradients of a few tokens."""
    model.zero_grad()
    ids = torch.randint(1, 96, (1, 23), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with contexts[0] if contexts else nullcontext(), contexts[1] if contexts[1:] else nullcontext():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids, use_cache=False).logits.float()
        factor = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        (logits * factor).sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad.dtype == p.dtype for p in trained)
    return logits.detach(), torch.cat([p.grad.float().flatten() for p in trained])


def distance(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


def assert_as_close_as_the_model(model, *contexts):
    """Fused kernels are no further from float32 than the module's own operations under autocast."""
    exact, plain, fused = computed(model, autocast=False), computed(model), computed(model, *contexts)
    slack = 2.0 if INTERPRETED else 1.5  # the interpreter cuts bfloat16 off instead of rounding it
    for ours, theirs, reference in zip(fused, plain, exact, strict=True):
        assert 1e-5 < distance(ours, reference) < slack * distance(theirs, reference)
    if not INTERPRETED:
        assert torch.cosine_similarity(fused[1], plain[1], dim=0) > 0.9995
        assert fused[1].norm().item() == pytest.approx(plain[1].norm().item(), rel=0.005)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Llama", EVERYTHING),
        ("Qwen2", EVERYTHING),
        ("Qwen3", EVERYTHING | {"norm": 9}),
        ("Gemma", EVERYTHING),
        ("Mistral", EVERYTHING),
        ("Phi3", EVERYTHING | {"projection": 4}),
        ("Phi", {"rotary embedding": 2, "projection": 2}),
        ("Olmo2", {"norm": 9, "rotary embedding": 2, "MLP": 2, "projection": 6}),
    ],
)
def test_gradients_are_as_close_as_the_models_own(name, counts):
    model = model_of(name)
    fusion = fusion_of(model)
    assert fusion.counts == counts
    assert_as_close_as_the_model(model, fusion.active())


@pytest.mark.parametrize(
    ("name", "changes", "left"),
    [
        ("Granite", {"residual_multiplier": 0.9}, {"layer": 2}),  # a factor after attention and MLP
        ("Gemma2", {}, {"layer": 2}),  # four norms a layer
        ("Cohere", {}, {"rotary embedding": 2}),  # rotates neighbours instead of halves
        ("Llama", {"hidden_act": "relu"}, {"MLP": 2}),
    ],
)
def test_what_computes_something_else_is_left(name, changes, left):
    model = model_of(name, **changes)
    fusion = fusion_of(model)
    assert fusion.left == left
    assert not any(what in fusion.counts for what in left)
    assert_as_close_as_the_model(model, fusion.active())


def test_a_fused_pass_is_deterministic():
    model = model_of("Qwen2")
    fusion = fusion_of(model)
    first, second = computed(model, fusion.active()), computed(model, fusion.active())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_recomputed_layers_give_the_same_gradients_to_the_bit(name):
    model = model_of(name)
    fusion = fusion_of(model)
    once = computed(model, fusion.active())
    again = computed(model, fusion.active(), recomputing(model))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_weights_in_bfloat16():
    model = model_of("Qwen2", torch.bfloat16)
    fusion = fusion_of(model)
    assert fusion.counts == EVERYTHING
    fused, plain = computed(model, fusion.active()), computed(model)
    assert all(distance(a, b) < 0.03 for a, b in zip(fused, plain, strict=True))


def test_adapters_and_frozen_weights():
    peft = pytest.importorskip("peft")
    model = model_of("Qwen2")
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    fusion = fusion_of(model.eval())
    assert fusion.counts == EVERYTHING | {"projection": 2}  # only the attention's output has no adapter
    assert_as_close_as_the_model(model, fusion.active())


def test_hooks_run():
    """A layer does without the calls of its norms, unless one of them has a hook."""
    model = model_of("Llama")
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: seen.append("MLP"))
    fusion = fusion_of(model)
    assert fusion.counts == EVERYTHING | {"layer": 1}
    seen.clear()
    computed(model, fusion.active())
    assert seen == ["norm", "MLP"]


def test_a_forward_that_a_library_set_is_kept():
    model = model_of("Llama")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[1].self_attn
    set_by_others = mlp.forward, attention.forward = partial(mlp.forward), partial(attention.forward)
    fusion = fusion_of(model)
    assert fusion.counts == EVERYTHING | {"rotary embedding": 1, "MLP": 1, "projection": 3}
    with fusion.active():
        assert (mlp.forward, attention.forward) == set_by_others
    computed(model, fusion.active())
    assert (mlp.forward, attention.forward) == set_by_others


@pytest.fixture
def group_of_one():
    dist.init_process_group(
        "gloo" if INTERPRETED else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_layers_are_fused_too(group_of_one, recompute):
    """Their weights are whole, and in bfloat16, only while a layer computes."""

    def gradients(fused, dtype=torch.bfloat16):
        model = model_of("Qwen2")
        how = {"pad_id": 0, "temperature": 1.0, "dtype": dtype, "fused": fused, "recompute": recompute}
        mesh = init_device_mesh(DEVICE.type, (1,))
        responses = ShardedLogps(model, mesh=mesh, device=DEVICE, anyone=lambda here: here, **how)
        if fused:
            responses._fusion = responses._find_fusion()  # in the interpreter, which is not a GPU, it is not asked for
            assert responses._fusion.counts == EVERYTHING
        with responses.compute(SAMPLES) as stats:
            stats.logps.sum().backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

    exact, plain, fused = gradients(False, torch.float32), gradients(False), gradients(True)
    assert 1e-5 < distance(fused, exact) < (2.0 if INTERPRETED else 1.5) * distance(plain, exact)


def test_outside_the_module_is_as_it_was():
    model, other = model_of("Qwen2"), model_of("Qwen2")
    file = sys.modules[type(model).__module__]
    rotary, state = file.apply_rotary_pos_emb, torch.random.get_rng_state()
    before = computed(other)
    fusion = fusion_of(model)
    with fusion.active():
        assert file.apply_rotary_pos_emb is rotary
        assert "forward" in vars(model.model.layers[0].self_attn)
        assert all(torch.equal(a, b) for a, b in zip(computed(other), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(model.state_dict()) == list(other.state_dict())
