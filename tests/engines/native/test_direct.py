"""The forward pass without the calls around it: the same logits bit for bit, or not used."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dapo_rl.config import ModelSettings
from dapo_rl.engines.native import batch
from dapo_rl.engines.native.decode import next_logits
from dapo_rl.engines.native.direct import direct_forward
from dapo_rl.models.load import load_model

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
"""With shared keys, and no power of two."""
FAMILY = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, with biases and tied weights": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, wide heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def made(kind, model_class, more):
    torch.manual_seed(0)
    return model_class(kind(**SMALL, **more)).eval()


def attend(layer, q_THD, k_TKD, v_TKD, scale):
    """Each token attends to those before it in the row."""
    k, v = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("thd,shd->hts", q_THD, k) * scale
    scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("rows", [1, 2, 33])
@torch.inference_mode()
def test_the_logits_are_the_same_bit_for_bit(name, rows):
    model = made(*FAMILY[name])
    direct = direct_forward(model)
    assert direct is not None
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(SMALL["vocab_size"], (rows,), generator=generator)
    positions = torch.randint(500, (rows,), generator=generator)
    assert torch.equal(direct(ids, positions, attend), next_logits(model, ids, positions, attend, 501))
    for parameter in model.parameters():  # as an update does
        parameter.mul_(1.01)
    assert torch.equal(direct(ids, positions, attend), next_logits(model, ids, positions, attend, 501))


@torch.inference_mode()
def test_the_embedded_model_is_called_directly():
    model, _ = load_model(ModelSettings(device="cpu"))
    assert direct_forward(model) is not None


def test_what_is_of_another_form_is_called_as_it_is():
    assert direct_forward(made(Olmo2Config, Olmo2ForCausalLM, {})) is None  # other norms
    assert direct_forward(made(GraniteConfig, GraniteForCausalLM, {"embedding_multiplier": 2.0})) is None
    assert direct_forward(made(MistralConfig, MistralForCausalLM, {"sliding_window": 8})) is None
    assert direct_forward(torch.nn.Linear(2, 2)) is None
    model = made(*FAMILY["llama"])
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + 1)
    assert direct_forward(model) is None
    hook.remove()
    assert direct_forward(model) is not None
    model.model.layers[2].self_attn.scaling = 0.5
    assert direct_forward(model) is not None, "it is read from the model"
    layer = model.model.layers[0]
    plain = layer.forward
    layer.forward = lambda hidden, **more: 2 * plain(hidden, **more)
    assert direct_forward(model) is None, "other numbers"


def test_a_batch_of_another_type_or_form_takes_the_whole_way(monkeypatch):
    asked = []
    monkeypatch.setattr(batch, "direct_forward", lambda model: asked.append(model))
    model = made(*FAMILY["llama"])
    budget = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(batch.Batch, "make_room", lambda self, longest: None)
    how = {"page_tokens": None, "reserved": False}
    for dtype in (torch.float32, torch.bfloat16):
        built = batch.Batch(model, {}, torch.zeros(1), None, budget, dtype, **how)
        assert callable(built._forward)
    assert asked == [model]
