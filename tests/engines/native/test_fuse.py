"""A fused model computes what the model does, with kernels' counterparts in plain torch; other models stay as they
are."""

import copy
import functools
import gc
import weakref
from collections import Counter

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.native.model_runner import next_logits
from dapo_rl.models.kernels.fuse_inference import fuse
from dapo_rl.models.kernels.fuse_linears import can_prepack
from dapo_rl.models.kernels.module_patterns import FusedModule, Handed, can_join, with_global
from dapo_rl.models.packing import pack

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

    def gated_linear(self, x, weight, bias, kind):
        self.calls["gated_linear"] += 1
        gate, up = functional.linear(x, weight, bias).chunk(2, -1)
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
    fuse(model, TorchOps())
    assert_same_logits(logits_of(model), expected)


def fused_by_hand(model, ops, tokens=11):
    """The logits of a Llama, Qwen2 or Mistral in fused operations, one after the other."""
    ids = torch.randint(1, 96, (1, tokens), generator=torch.Generator().manual_seed(1))
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    layers, last = model.model.layers, model.model.norm
    total = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(total, torch.arange(tokens)[None])
    first = layers[0].input_layernorm
    x = ops.rms_norm(total, first.weight, first.variance_epsilon, False)
    for layer, following in zip(layers, [*(layer.input_layernorm for layer in layers[1:]), last], strict=True):
        attention, mlp, inner = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if qkv[0].bias is None else torch.cat([linear.bias for linear in qkv])
        joint = functional.linear(x, torch.cat([linear.weight for linear in qkv]), bias)
        q, k, v = (
            part.unflatten(-1, (-1, 16)).transpose(1, 2)
            for part in joint.split([linear.out_features for linear in qkv], -1)
        )
        q, k = ops.rotary(q, k, cos, sin)
        attended = attend(attention, q, k, v, None, scaling=attention.scaling)[0].flatten(2)
        x, total = ops.add_rms_norm(
            attention.o_proj(attended), total, inner.weight, inner.variance_epsilon, plus_one=False
        )
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        x = mlp.down_proj(ops.gated_linear(x, gate_up, None, "silu"))
        x, total = ops.add_rms_norm(x, total, following.weight, following.variance_epsilon, plus_one=False)
    return model.lm_head(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral"])
def test_fused_logits_are_bit_for_bit_those_of_the_fused_operations(name, dtype):
    model = small_model(name, dtype)
    with torch.inference_mode():
        expected = fused_by_hand(model, TorchOps())
    fuse(model, TorchOps())
    assert torch.equal(logits_of(model), expected)


USUAL = {"attention": 3, "MLP": 3, "norm": 7, "layer": 3, "rotary embedding": 1}
FUSED = {
    **dict.fromkeys(["Llama", "Qwen2", "Gemma", "Mistral", "Granite"], (USUAL, {})),
    "Qwen3": (USUAL | {"norm": 13}, {}),
    "Phi3": ({"MLP": 3, "norm": 7, "layer": 3, "rotary embedding": 1}, {}),
    "Phi": ({"attention": 3, "rotary embedding": 1}, {"head": 1}),
    "Gemma2": ({"attention": 3, "MLP": 3, "norm": 13, "rotary embedding": 1}, {"layer": 3}),
    "Olmo2": ({"attention": 3, "MLP": 3, "norm": 13, "rotary embedding": 1}, {"layer": 3}),
    "Cohere": ({"attention": 3, "MLP": 3}, {"layer": 3, "rotary embedding": 1}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULLY + ALSO)
def test_what_is_fused_in_each_architecture(name, dtype):
    fused = fuse(small_model(name, dtype), TorchOps())
    assert (fused.counts, fused.left) == FUSED[name]


@pytest.mark.parametrize("name", FULLY)
def test_everything_is_called_in_models_of_the_usual_form(name):
    ops = TorchOps()
    model = small_model(name)
    fuse(model, ops)
    ops.calls.clear()
    logits_of(model)
    # Only the first norm finds no residual sum before it; Qwen3 has two more in each layer, of queries and keys.
    assert ops.calls == {"rms_norm": 7 if name == "Qwen3" else 1, "add_rms_norm": 6, "gated_linear": 3, "rotary": 3}


def test_what_differs_is_left_alone():
    """Gemma 2 has norms behind the attention and the MLP too; Granite scales its residual sums."""
    assert fuse(small_model("Gemma2"), TorchOps()).left["layer"] == 3
    granite = small_model("Granite", residual_multiplier=0.5)
    assert fuse(granite, TorchOps()).left["layer"] == 3

    class WrongOps(TorchOps):
        def _norm(self, x, weight, eps, plus_one):
            return super()._norm(x, weight, eps, plus_one) * 1.1

        def gated_linear(self, x, weight, bias, kind):
            return super().gated_linear(x, weight, bias, kind).roll(1, -1)

        def rotary(self, q, k, cos, sin):
            return q, k

    model = small_model("Llama")
    expected = logits_of(model)
    fused = fuse(model, WrongOps())
    assert fused.left == {"MLP": 3, "norm": 7, "layer": 3, "rotary embedding": 1}
    assert_same_logits(logits_of(model), expected)


def test_a_module_with_a_forward_of_its_own_is_left_alone():
    """It would hide the fused one."""
    model = small_model("Llama")
    expected = logits_of(model)
    for module in (model.model.layers[1], model.model.layers[1].mlp, model.model.layers[2].self_attn.k_proj):
        module.forward = functools.partial(type(module).forward, module)
    fused = fuse(model, TorchOps())
    assert fused.left == {"MLP": 1, "layer": 1, "attention": 1}
    assert_same_logits(logits_of(model), expected)


def test_partial_rotary_embedding():
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = small_model("Phi3", rope_parameters=half)
    expected = logits_of(model)
    ops = TorchOps()
    fuse(model, ops)
    ops.calls.clear()
    assert_same_logits(logits_of(model), expected)
    assert ops.calls["rotary"] == 3


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi3"])
def test_projections_alone_without_ops(name):
    model = small_model(name)
    expected = logits_of(model)
    fused = fuse(model)
    assert_same_logits(logits_of(model), expected)
    assert fused.counts == ({} if name == "Phi3" else {"MLP": 3, "attention": 3})


def test_names_values_and_memory_stay():
    model = small_model("Qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    size = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    fuse(model, TorchOps())
    assert list(model.state_dict()) == list(before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    after = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    assert after == size


def test_weights_copied_in_place_are_the_ones_used():
    model, other = small_model("Qwen2"), small_model("Qwen2")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.05)
    fuse(model, TorchOps())
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(other.parameters()))
    assert_same_logits(logits_of(model), logits_of(other))
    for each in (model, other):
        each.load_state_dict({name: tensor + 0.01 for name, tensor in other.state_dict().items()})
    assert_same_logits(logits_of(model), logits_of(other))


def test_a_model_is_fused_once():
    model = small_model("Qwen2")
    fuse(model)
    with pytest.raises(RuntimeError, match="already fused"):
        fuse(model, TorchOps())


def test_layers_that_share_parameters_share_the_joint_weight():
    model = small_model("Qwen2")
    first, last = model.model.layers[0], model.model.layers[2]
    for name in ("q_proj", "k_proj", "v_proj"):
        for which in ("weight", "bias"):
            setattr(getattr(last.self_attn, name), which, getattr(getattr(first.self_attn, name), which))
    twin = copy.deepcopy(model)
    fuse(model, TorchOps())
    for each in (model, twin):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(1.1)
    assert_same_logits(logits_of(model), logits_of(twin))


def gradients_of(model):
    ids = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULLY + ALSO)
def test_the_model_whose_copy_is_fused_stays_as_it_is(name, tmp_path):
    """Logits, gradients, classes and what it saves, also of a model that was made later."""
    model = small_model(name)
    expected, gradients = logits_of(model), gradients_of(model)
    classes = [type(module) for module in model.modules()]
    ops = TorchOps()
    own = copy.deepcopy(model).requires_grad_(False)
    fuse(own, ops)
    logits_of(own)
    ops.calls.clear()
    torch.save(model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (model, copy.deepcopy(model), saved, small_model(name)):
        assert torch.equal(logits_of(each), expected)
        again = gradients_of(each)
        assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
        assert [type(module) for module in each.modules()] == classes
    assert not ops.calls
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights
    assert all(torch.equal(weights[name], model.state_dict()[name]) for name in weights)


def test_a_fused_copy_runs_in_the_middle_of_a_backward_pass():
    """Activations that are recomputed call the modeling file while the copy samples."""
    model = small_model("Qwen2").train()
    gradients = gradients_of(model)
    own = copy.deepcopy(model).requires_grad_(False).eval()
    expected = logits_of(own)
    ops = TorchOps()
    fuse(own, ops)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    sampled = []
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.register_hook(lambda gradient: sampled.append(logits_of(own)))
    ops.calls.clear()
    again = gradients_of(model)
    assert len(sampled) == 3
    for logits in sampled:
        assert_same_logits(logits, expected)
    assert ops.calls["rotary"] == 9
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_fuses_its_own_copy_alone(dtype):
    class Text:
        eos_token_id = pad_token_id = 2

    model = small_model("Llama")
    NativeEngine(model, Text(), dtype=dtype)
    assert not any(isinstance(module, FusedModule) for module in model.modules())
    places = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(places) == len(list(model.parameters()))  # none is part of a joint weight


@pytest.mark.parametrize("name", FULLY)
def test_the_attention_of_a_fused_model_is_looked_up_by_name(name):
    model = small_model(name)
    packed, _ = pack([((5, 6, 7, 8), ()), ((9, 10, 11), ())], torch.device("cpu"), share_prompts=False)

    def logits():
        seen = []

        def attend(layer, q, k, v, scale):
            seen.append(layer)
            return packed(layer, q, k, v, scale)

        with torch.inference_mode():
            result = next_logits(model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest)
        assert seen == [0, 1, 2]
        return result

    expected = logits()
    ops = TorchOps()
    fuse(model, ops)
    ops.calls.clear()
    assert_same_logits(logits(), expected)
    assert ops.calls["rotary"] == 3


@pytest.mark.parametrize("prepack", [False, True])
def test_a_discarded_model_is_freed_at_once(prepack):
    """Not by the garbage collector: another engine may need its memory."""
    model = small_model("Qwen2")
    fused = fuse(model, TorchOps(), prepack=prepack)
    logits_of(model)
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.disable()
    try:
        del model, fused
        assert not any(parameter() is not None for parameter in alive)
    finally:
        gc.enable()


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
    fuse(attention)
    attention.q_proj(x)
    torch.testing.assert_close((attention.k_proj(other), attention.v_proj(x)), expected)


def test_layers_of_other_kinds_are_not_joined():
    linear = torch.nn.Linear
    assert can_join([linear(4, 2), linear(4, 3)])
    assert not can_join([linear(4, 2), linear(5, 2)])
    assert not can_join([linear(4, 2), linear(4, 2, bias=False)])
    assert not can_join([linear(4, 2), linear(4, 2).bfloat16()])
    assert not can_join([linear(4, 2), torch.nn.Identity()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULLY + ALSO)
def test_prepacked_weights_give_the_same_logits_and_follow_new_ones(name, dtype):
    """Every CPU can put float32 in order; engines do it in bfloat16 alone."""
    model, other = small_model(name, dtype), small_model(name, dtype)
    if not can_prepack(model.get_output_embeddings().weight):
        pytest.skip(f"this CPU cannot put {dtype} in order")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    plain, changed = logits_of(model), logits_of(other)
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    fused = fuse(model, prepack=True)
    assert len(fused.prepacked) == len(fused.joins) + len(linears) - sum(len(join.sizes) for join in fused.joins)
    assert_same_logits(logits_of(model), plain)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)
    fused.refresh()
    assert_same_logits(logits_of(model), changed)


def test_what_a_processor_cannot_put_in_order_is_not_prepacked(monkeypatch):
    weight = torch.randn(80, 32)
    assert can_prepack(weight)
    assert not can_prepack(weight.to("meta"))

    def refuse(*_):
        raise RuntimeError("bf16 path needs the cpu support avx512")

    monkeypatch.setattr("dapo_rl.models.kernels.fuse_linears._in_order", refuse)
    assert not can_prepack(weight)


def scale():
    return 2


def scaled(x, *, times=1):
    return x * scale() * times


def plus(amount):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments, **named):
            return function(*arguments, **named) + amount

        return wrapper

    return decorate


def test_a_copy_of_a_function_has_its_own_global():
    copied = with_global(scaled, "scale", lambda: 5)
    assert (copied(3), copied(3, times=2)) == (15, 30)
    assert (scaled(3), scaled(3, times=2)) == (6, 12)


def test_decorators_are_copied_with_the_function():
    decorated = plus(100)(plus(10)(scaled))
    copied = with_global(decorated, "scale", lambda: 5)
    assert copied(3, times=2) == 140
    assert decorated(3, times=2) == 122


def held_in_a_list(function, held):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return held[0](*arguments, **named)

    return wrapper


def test_functions_that_cannot_be_copied():
    assert with_global(scaled, "rate", None) is None
    assert with_global(held_in_a_list(scaled, [scaled]), "scale", None) is None
    assert with_global(functools.partial(scaled), "scale", None) is None


@pytest.mark.parametrize("copyable", [True, False])
def test_an_attention_with_a_decorated_forward(copyable):
    model, ops = small_model("Llama"), TorchOps()
    expected = logits_of(model)
    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward

    class Decorated(attention):
        forward = functools.wraps(plain)(lambda *a, **n: plain(*a, **n)) if copyable else held_in_a_list(plain, [plain])

    for layer in model.model.layers:
        layer.self_attn.__class__ = Decorated
    fused = fuse(model, ops)
    assert (fused.counts["rotary embedding"], fused.left["rotary embedding"]) == ((1, 0) if copyable else (0, 1))
    ops.calls.clear()
    assert_same_logits(logits_of(model), expected)
    assert ops.calls["rotary"] == (3 if copyable else 0)
