"""A fused model computes what the model does, with kernels' counterparts in plain torch."""

from collections import Counter

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

from dapo_rl.rollout.native.fuse import Handed, Join, fuse
from dapo_rl.rollout.native.prepack import can_prepack

SMALL = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
FULLY = ["Llama", "Qwen2", "Qwen3", "Gemma", "Mistral", "Phi3"]
ALSO = ["Phi", "Granite", "Gemma2", "Olmo2", "Cohere"]
DTYPES = [torch.float32, torch.bfloat16]


class TorchOps:
    def __init__(self):
        self.calls = Counter()

    def rms_norm(self, x, weight, eps, plus_one):
        self.calls["rms_norm"] += 1
        return self._norm(x, weight, eps, plus_one)

    def add_rms_norm(self, x, residual, weight, eps, plus_one):
        self.calls["add_rms_norm"] += 1
        total = residual + x
        return self._norm(total, weight, eps, plus_one), total

    def gated(self, gate_up, kind):
        self.calls["gated"] += 1
        gate, up = gate_up.chunk(2, -1)
        act = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
        return act * up

    def rotary(self, q, k, cos, sin):
        self.calls["rotary"] += 1
        W = cos.shape[-1]
        return tuple(self._turn(x, cos[:, None], sin[:, None], W) for x in (q, k))

    def _norm(self, x, weight, eps, plus_one):
        x_32 = x.float()
        x_32 = x_32 * torch.rsqrt(x_32.pow(2).mean(-1, keepdim=True) + eps)
        return (x_32 * (1 + weight.float())).to(x.dtype) if plus_one else weight * x_32.to(x.dtype)

    def _turn(self, x, cos, sin, W):
        x_1, x_2 = x[..., :W].chunk(2, -1)
        turned = x[..., :W] * cos + torch.cat([-x_2, x_1], -1) * sin
        return torch.cat([turned, x[..., W:]], -1)


def small_model(name, dtype=torch.float32, **more):
    """With weights, norms and biases that are all random."""
    torch.manual_seed((FULLY + ALSO).index(name))
    if name == "Qwen2":
        more = {"attention_bias": True, **more}
    config = getattr(transformers, f"{name}Config")(**SMALL, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def logits_of(model, tokens=11):
    ids = torch.randint(1, 96, (1, tokens), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def assert_same_logits(actual, expected):
    tolerance = 1e-5 if expected.dtype == torch.float32 else 0.04
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULLY + ALSO)
def test_fused_logits_are_the_models(name, dtype):
    model = small_model(name, dtype)
    expected = logits_of(model)
    with fuse(model, TorchOps()):
        assert_same_logits(logits_of(model), expected)
    assert_same_logits(logits_of(model), expected)


@pytest.mark.parametrize("name", FULLY)
def test_everything_is_fused_in_models_of_the_usual_form(name):
    ops = TorchOps()
    model = small_model(name)
    fused = fuse(model, ops)
    assert not fused.left
    assert fused.counts["layer"] == fused.counts["MLP"] == 3
    assert fused.counts["attention"] == (0 if name == "Phi3" else 3)
    assert fused.counts["rotary embedding"] == 1
    assert fused.counts["norm"] == (13 if name == "Qwen3" else 7)
    ops.calls.clear()
    with fused:
        logits_of(model)
    # Only the first norm finds no residual sum before it; Qwen3 has two more in each layer, of queries and keys.
    assert ops.calls == {"rms_norm": 7 if name == "Qwen3" else 1, "add_rms_norm": 6, "gated": 3, "rotary": 3}


def test_report_is_one_line():
    assert fuse(small_model("Llama"), TorchOps()).report() == (
        "fused 3 attentions, 3 MLPs, 7 norms, 3 layers, 1 rotary embedding"
    )
    assert fuse(small_model("Llama")).report() == "fused 3 attentions, 3 MLPs"
    assert "not fused: 3 layers" in fuse(small_model("Granite", residual_multiplier=0.5), TorchOps()).report()


def test_what_differs_is_left_alone():
    """Gemma 2 has norms behind the attention and the MLP too; Granite scales its residual sums."""
    assert fuse(small_model("Gemma2"), TorchOps()).left["layer"] == 3
    granite = small_model("Granite", residual_multiplier=0.5)
    assert fuse(granite, TorchOps()).left["layer"] == 3

    class WrongOps(TorchOps):
        def _norm(self, x, weight, eps, plus_one):
            return super()._norm(x, weight, eps, plus_one) * 1.1

        def gated(self, gate_up, kind):
            return super().gated(gate_up, kind).roll(1, -1)

        def rotary(self, q, k, cos, sin):
            return q, k

    model = small_model("Llama")
    fused = fuse(model, WrongOps())
    assert fused.left == {"MLP": 3, "norm": 7, "layer": 3, "rotary embedding": 1}
    expected = logits_of(model)
    with fused:
        assert_same_logits(logits_of(model), expected)


def test_partial_rotary_embedding():
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = small_model("Phi3", rope_parameters=half)
    expected = logits_of(model)
    ops = TorchOps()
    with fuse(model, ops):
        ops.calls.clear()
        assert_same_logits(logits_of(model), expected)
    assert ops.calls["rotary"] == 3


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi3"])
def test_projections_alone_without_ops(name):
    model = small_model(name)
    expected = logits_of(model)
    with fuse(model) as fused:
        assert_same_logits(logits_of(model), expected)
    assert fused.counts == ({} if name == "Phi3" else {"MLP": 3, "attention": 3})


def test_names_values_and_memory_stay():
    model = small_model("Qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    size = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    with fuse(model, TorchOps()):
        assert list(model.state_dict()) == list(before)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    after = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    assert after == size


def test_weights_copied_in_place_are_the_ones_used():
    model, other = small_model("Qwen2"), small_model("Qwen2")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.05)
    fused = fuse(model, TorchOps())
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(other.parameters()))
    assert fused.intact()
    with fused:
        assert_same_logits(logits_of(model), logits_of(other))
    model.load_state_dict({name: tensor + 0.01 for name, tensor in other.state_dict().items()})
    expected = logits_of(model)
    with fused:
        assert_same_logits(logits_of(model), expected)
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros_like(model.model.layers[1].mlp.up_proj.weight)
    assert not fused.intact()


def test_fusing_twice_keeps_the_first():
    model = small_model("Qwen2")
    first = fuse(model, TorchOps())
    second = fuse(model, TorchOps())
    assert first.intact()
    assert second.intact()
    assert first.joins[0].weight.data_ptr() == second.joins[0].weight.data_ptr()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected = logits_of(model)
    for fused in (first, second):
        with fused:
            assert_same_logits(logits_of(model), expected)


def test_everything_is_undone():
    model = small_model("Gemma")
    file = transformers.models.gemma.modeling_gemma
    plain = file.apply_rotary_pos_emb
    fused = fuse(model, TorchOps())
    assert file.apply_rotary_pos_emb is plain
    with fused:
        assert file.apply_rotary_pos_emb is not plain
    with pytest.raises(ZeroDivisionError), fused:
        _ = 1 / 0
    assert file.apply_rotary_pos_emb is plain
    assert not any("forward" in vars(module) for module in model.modules())
    with fused, pytest.raises(RuntimeError, match="already"), fused:
        pass


def test_a_fused_model_still_learns_and_is_saved(tmp_path):
    model, twin = small_model("Llama"), small_model("Llama")
    fuse(model, TorchOps())
    ids = torch.randint(1, 96, (2, 9))
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert_same_logits(logits_of(model), logits_of(twin))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[name], parameter)


def test_what_is_handed_over_serves_one_input_once():
    handed, x, y = Handed(), torch.ones(2), torch.zeros(2)
    handed.leave(x, y)
    assert handed.take(torch.ones(2)) is None
    assert handed.take(x) is y
    assert handed.take(x) is None


def test_keys_and_values_of_another_input_are_computed():
    attention = small_model("Qwen2").model.layers[0].self_attn
    x, other = torch.randn(2, 1, 3, 96)
    expected = attention.k_proj(other), attention.v_proj(x)
    with fuse(attention):
        attention.q_proj(x)
        torch.testing.assert_close((attention.k_proj(other), attention.v_proj(x)), expected)


def test_layers_of_other_kinds_are_not_joined():
    linear = torch.nn.Linear
    assert Join.possible([linear(4, 2), linear(4, 3)])
    assert not Join.possible([linear(4, 2), linear(5, 2)])
    assert not Join.possible([linear(4, 2), linear(4, 2, bias=False)])
    assert not Join.possible([linear(4, 2), linear(4, 2).bfloat16()])
    assert not Join.possible([linear(4, 2), torch.nn.Identity()])


@pytest.mark.parametrize("name", FULLY + ALSO)
def test_prepacked_weights_give_the_same_logits_and_follow_new_ones(name):
    """In float32, which every CPU can put in order; engines do it in bfloat16 alone."""
    model, other = small_model(name), small_model(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    plain, changed = logits_of(model), logits_of(other)
    fused = fuse(model, prepack=True)
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    assert len(fused.prepacked) == len(fused.joins) + len(linears) - sum(len(join.sizes) for join in fused.joins)
    with fused:
        assert_same_logits(logits_of(model), plain)
        with torch.no_grad():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        fused.refresh()
        assert_same_logits(logits_of(model), changed)
    assert_same_logits(logits_of(model), changed)


def test_what_a_processor_cannot_put_in_order_is_not_prepacked(monkeypatch):
    weight = torch.randn(80, 32)
    assert can_prepack(weight)
    assert not can_prepack(weight.to("meta"))

    def refuse(*_):
        raise RuntimeError("bf16 path needs the cpu support avx512")

    monkeypatch.setattr("dapo_rl.rollout.native.prepack._in_order", refuse)
    assert not can_prepack(weight)
