"""Whole models with the kernels in them.

On a CUDA GPU, or on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_fused_model.py`.
"""

import os

import pytest
import torch
import transformers

from dapo_rl.rollout.native.fuse import fuse
from dapo_rl.rollout.native.state import SlotState

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("neither a CUDA GPU nor Triton's interpreter", allow_module_level=True)

from dapo_rl.rollout.native import kernels  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
SMALL = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def small_model(name, dtype):
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(DEVICE, dtype)


def assert_same_logits(actual, expected):
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.04
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Mistral", "Phi3", "Phi"])
def test_fused_logits_are_the_models(name, dtype):
    model = small_model(name, dtype)
    ids = torch.randint(1, 96, (1, 5), device=DEVICE)
    expected = model(input_ids=ids, use_cache=False).logits
    fused = fuse(model, kernels)
    assert not fused.left or name == "Phi"
    with fused:
        assert_same_logits(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
@torch.inference_mode()
def test_a_step_replayed_as_a_graph_is_the_step():
    """Two steps of attention, a fused model and drawing: once each in turn, once as a graph that is replayed."""
    B, K, R, D, C, V, S = 5, 2, 3, 16, 64, 96, 6
    model = small_model("Llama", torch.bfloat16)
    caches = torch.randn(2, S, K, C, D, device=DEVICE).bfloat16()
    start = SlotState.empty(S, 8, DEVICE)
    start.done[:B] = False
    start.limit.fill_(8)
    start.position.copy_(torch.tensor([0, 1, 15, 16, 60, 0]))
    slots = torch.arange(B, device=DEVICE)
    is_stop = torch.zeros(V, dtype=torch.bool, device=DEVICE)

    def step(state, caches):
        positions = state.position[slots]
        ids = state.last_token[slots][None]
        logits = model(input_ids=ids, position_ids=positions[None].long(), use_cache=False).logits[0]
        qkv = logits[:, : (R + 2) * K].repeat_interleave(D, 1).view(B, (R + 2) * K, D)
        q, k, v = qkv.split([R * K, K, K], dim=1)
        for splits in (1, 3):
            attended = kernels.decode_attention(q, k, v, *caches, slots, positions, 0.25, splits)
        return kernels.draw_and_advance(logits + attended.mean(), slots, state, is_stop)

    def fresh():
        return SlotState(**{name: getattr(start, name).clone() for name in SlotState.__slots__}), caches.clone()

    with fuse(model):
        state, expected_caches = fresh()
        for _ in range(2):
            step(state, expected_caches)
        replayed, replayed_caches = fresh()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(replayed, replayed_caches)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed.tokens, state.tokens)
    assert torch.equal(replayed.position, state.position)
    assert torch.equal(replayed_caches, expected_caches)
