"""Whole models with the kernels in them.

On a CUDA GPU, or on a CPU in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_fused_model.py`.
"""

import os

import pytest
import torch
import transformers

from dapo_rl.engines.native.slots import SlotState
from dapo_rl.models.attention import attending
from dapo_rl.models.kernels.fuse_inference import fuse

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("neither a CUDA GPU nor Triton's interpreter", allow_module_level=True)

from dapo_rl.engines.native import kernels  # noqa: E402
from dapo_rl.models.kernels import decode_ops  # noqa: E402

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
    # A fused head has float32 logits.
    expected = expected.float()
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma", "Mistral", "Phi3", "Phi"])
def test_fused_logits_are_the_models(name, dtype):
    model = small_model(name, dtype)
    ids = torch.randint(1, 96, (1, 5), device=DEVICE)
    expected = model(input_ids=ids, use_cache=False).logits
    fused = fuse(model, decode_ops)
    assert not fused.left or name == "Phi"
    assert_same_logits(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
@torch.inference_mode()
def test_a_step_replayed_as_a_graph_is_the_step():
    """Three steps: one after the other, and as a graph that is replayed."""
    B, S, C, M = 5, 6, 64, 8
    model = small_model("Llama", torch.bfloat16)
    slots = torch.arange(B, device=DEVICE)
    is_stop = torch.zeros(96, dtype=torch.bool, device=DEVICE)
    start = SlotState.empty(S, M, DEVICE)
    start.done[:B] = False
    start.limit.fill_(M)
    start.position.copy_(torch.tensor([0, 1, 15, 16, 60, 0]))
    caches = torch.randn(2, 2, S, 2, C, 16, device=DEVICE).bfloat16()  # Keys and values of two layers.
    table = torch.arange(S, dtype=torch.int32, device=DEVICE)[:, None]

    def fresh():
        return SlotState(**{name: getattr(start, name).clone() for name in SlotState.__slots__}), caches.clone()

    def step(state, caches, splits):
        positions = state.position[slots]

        def attend(layer, q, k, v, scale):
            return kernels.decode_attention(q, k, v, *caches[:, layer], table, slots, positions, scale, splits)

        with attending(model, attend, C):
            output = model(
                input_ids=state.last_token[slots][None], position_ids=positions[None].long(), use_cache=False
            )
        kernels.draw_and_advance(output.logits[0], slots, state, is_stop)

    fuse(model)
    for splits in (1, 3):
        (state, filled), (replayed, refilled) = fresh(), fresh()
        graph = torch.cuda.CUDAGraph()
        for _ in range(3):
            step(state, filled, splits)
        with torch.cuda.graph(graph):
            step(replayed, refilled, splits)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert replayed.generated.tolist() == [3] * B + [0]
        assert torch.equal(replayed.tokens, state.tokens)
        assert torch.equal(replayed.position, state.position)
        assert torch.equal(refilled, filled)
