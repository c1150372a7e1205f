"""LoRA: engines sample from what is trained, adapters alone change, and what is saved is what was trained."""

import copy
import json

import numpy as np
import pytest
import torch
from support import all_weights, small_model, tokenizer, train_sample, with_reference
from transformers import (
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dapo_rl import Config, DAPOTrainer
from dapo_rl.config import AlgoSettings, LoraSettings, ModelSettings, SamplingSettings, TrainSettings
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.protocol import EngineInputs, Request, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_model, take_over
from dapo_rl.models.lora import add_lora, has_lora, merged_copy, plain_weights, save_adapter
from dapo_rl.models.save import save_model
from dapo_rl.train.policy import HFPolicy

peft = pytest.importorskip("peft")

PROMPT = tuple(range(40, 52))


def adapted(seed=0, **settings):
    """A small model, and the same with adapters."""
    base = small_model()
    model = copy.deepcopy(base)
    add_lora(model, LoraSettings(**({"rank": 4, "alpha": 8} | settings)), seed)
    return base, model


def policy_of(model, reference=None, **algo):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(**algo),
        train=TrainSettings(lr=1e-2, weight_decay=0.0),
        norm_length=20,
        token_budget=10**6,
        reference=reference,
    )


def trained(**settings):
    """Adapters away from where they began, by two updates; and what the policy was before."""
    base, model = adapted(**settings)
    policy = policy_of(model)
    samples = [train_sample(PROMPT, tuple(range(60 + i, 70 + i)), (-3.0,) * 10, (-1.0) ** i, 0) for i in range(4)]
    for _ in range(2):
        policy.update(samples, lr=1e-2)
    return base, model, policy, samples


def logits(model):
    ids = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def test_new_adapters_change_nothing_and_follow_the_seed():
    base, model = adapted()
    torch.testing.assert_close(logits(model), logits(base), atol=0, rtol=0)
    same, other = adapted()[1].state_dict(), adapted(seed=1)[1].state_dict()
    mine = model.state_dict()
    drawn = [name for name in mine if "lora_A" in name]
    assert len(drawn) == 14  # seven linear layers in each of two blocks
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not any(torch.equal(mine[name], other[name]) for name in drawn)


@pytest.mark.parametrize("engine_name", ["native", "hf"])
def test_an_engine_samples_from_what_is_trained(engine_name):
    base, model, policy, _ = trained()
    assert (logits(model) - logits(base)).abs().max() > 0.1
    engine = build_engine(
        engine_name, EngineInputs(copy.deepcopy(base), tokenizer(), SamplingSettings(), torch.float32)
    )
    for version in (1, 2):
        engine.receive(version, policy.weights())
        engine.submit(Request("r", PROMPT, 6, SamplingParams(max_new_tokens=20, temperature=1.0), 3))
        samples = []
        while engine.pending:
            samples += [completion.sample for completion in engine.poll()]
        rows = [train_sample(PROMPT, sample.token_ids, 0.0, 0.0, 0) for sample in samples]
        for sample, expected in zip(samples, policy.score(rows), strict=True):
            assert sample.logps == pytest.approx(expected, abs=1e-4)
        policy.update([train_sample(PROMPT, s.token_ids, s.logps, 1.0, 0) for s in samples[:3]], lr=1e-2)


def test_adapters_alone_change_and_have_moments():
    before = adapted()[1].state_dict()
    _, model, policy, _ = trained()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    moments = sum(entry["exp_avg"].numel() for entry in policy.optimizer.state.values())
    assert moments == sum(before[name].numel() for name in changed)


def test_gradients_are_those_of_the_plain_computation():
    """Packed samples against the model's own forward pass, through frozen embeddings and a frozen output layer."""
    _, model, policy, samples = trained()
    policy.update(samples, lr=0.0)
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    padded = HFPolicy(
        model,
        pad_id=0,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(packed=False, gradient_checkpointing=True),
        norm_length=20,
        token_budget=10**6,
    )
    padded.update(samples, lr=0.0)
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert packed.keys() == plain.keys()
    assert all(".lora_" in name for name in packed)
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-3)


def test_the_reference_is_the_base_model_without_a_copy():
    base, model, policy, samples = trained()
    reference = policy_of(model, reference=model, kl_coef=0.1)
    copied = policy_of(copy.deepcopy(model), reference=base, kl_coef=0.1)
    scored = with_reference(reference, samples)
    ours = reference.update(scored, lr=0.0).metrics
    theirs = copied.update(with_reference(copied, samples), lr=0.0).metrics
    assert ours["actor/kl_loss"] > 1e-3
    assert ours["actor/kl_loss"] == pytest.approx(theirs["actor/kl_loss"], rel=1e-4)
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
    assert all(map(np.array_equal, policy.score(samples), reference.score(samples)))  # the adapters are on again
    assert reference.update(scored, lr=1e-2).metrics["actor/grad_norm"] > 0


def test_a_merged_model_computes_what_was_trained(tmp_path):
    _, model, policy, _ = trained()
    save_model(model, tokenizer(), tmp_path)
    plain, _ = load_model(ModelSettings(name=str(tmp_path), device="cpu"))
    assert not has_lora(plain)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=1e-4)
    for (name, tensor), (plain_name, saved) in zip(plain_weights(model), plain_weights(plain), strict=True):
        assert name == plain_name
        assert torch.equal(tensor, saved), name
    assert list(all_weights(policy.weights())) == [name for name, _ in small_model().named_parameters()]


def test_an_adapter_is_one_that_peft_loads(tmp_path):
    for name, targets in (("all", "all-linear"), ("some", ["q_proj", "v_proj"])):
        base, model, _, _ = trained(targets=targets)
        save_adapter(model, tokenizer(), LoraSettings(rank=4, alpha=8, targets=targets), "the/base", tmp_path / name)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / name)
        torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)
        assert (
            json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == "the/base"
        )


def test_experts_are_adapted_like_layers(tmp_path):
    """The weights of all experts of a layer are two tensors, and peft wraps one adapter around the other."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, initializer_range=0.3)
    base = Qwen3MoeForCausalLM(config).eval()
    model, settings = copy.deepcopy(base), LoraSettings(rank=4, alpha=8)
    add_lora(model, settings, 0)
    policy, samples = policy_of(model, reference=model), trained()[3]
    policy.update(samples, lr=1e-2)
    assert (logits(model) - logits(base)).abs().max() > 0.1
    for reference, expected in zip(policy.score_reference(samples), policy_of(base).score(samples), strict=True):
        assert reference == pytest.approx(expected, abs=1e-4)
    sampled = copy.deepcopy(base)
    take_over(sampled, policy.weights())
    save_model(model, tokenizer(), tmp_path / "merged")
    saved, _ = load_model(ModelSettings(name=str(tmp_path / "merged"), device="cpu"))
    save_adapter(model, tokenizer(), settings, "the/base", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    for other in (sampled, saved, merged_copy(model), loaded):
        torch.testing.assert_close(logits(other), logits(model), atol=1e-4, rtol=1e-4)
    assert merged_copy(model).state_dict().keys() == base.state_dict().keys()


@pytest.mark.parametrize(
    ("model_class", "config_class", "more"),
    [(PhimoeForCausalLM, PhimoeConfig, {}), (Llama4ForCausalLM, Llama4TextConfig, {"head_dim": 8})],
)
def test_a_router_has_no_adapter(model_class, config_class, more):
    """It returns its choice of experts, to which an adapter could not be added."""
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = model_class(config_class(**sizes, **heads, **more)).eval()
    before = logits(model)
    add_lora(model, LoraSettings(rank=4, alpha=8), 0)
    adapters = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert not [name for name in adapters if "router" in name]
    assert {name.split(".")[4] for name in adapters} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    torch.testing.assert_close(logits(model), before)


@pytest.mark.parametrize("targets", ["nonsense", ["lm_head"], ["embed_tokens"]])
def test_targets_that_cannot_be_are_one_line(targets):
    with pytest.raises(UserError, match=r"^model\.lora\.targets: .*") as caught:
        add_lora(small_model(tie_word_embeddings=False), LoraSettings(targets=targets), 0)
    assert "\n" not in str(caught.value)


def test_settings():
    assert Config.load().model.lora is None
    assert Config.load(None, ["model.lora={}"]).model.lora == LoraSettings()
    assert Config.load(None, ["model.lora.rank=8"]).model.lora == LoraSettings(rank=8)
    with pytest.raises(UserError, match=r"model\.lora\.save: 'merge' is not one of 'merged' or 'adapter'"):
        Config.load(None, ["model.lora.save=merge"])


SMALL = {
    "model.lora": {"rank": 4, "alpha": 8},
    "data.train": {"source": "arithmetic", "size": 64},
    "data.eval": {"source": "arithmetic", "split": "heldout", "size": 8},
    "data.max_prompt_tokens": 32,
    "sampling": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 48},
    "model.dtype": "float32",
    "algo.kl_coef": 0.01,
    "train": {"lr": 1e-2, "warmup_steps": 0},
    "checkpoint.every": 1,
    "log.report": False,
}


@pytest.mark.slow
def test_a_run_stops_goes_on_and_saves(tmp_path):
    def train(run, steps, resume=False, **changes):
        trainer = DAPOTrainer(config={**SMALL, "train.steps": steps, **changes}, run_dir=tmp_path / run)
        return trainer, trainer.train(resume=resume)

    straight, summary = train("straight", 3)
    assert summary["metrics"]["rollout/mismatch_kl"] < 1e-6
    train("stopped", 1)
    resumed, _ = train("stopped", 3, resume=True)
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name

    whole, _ = load_model(ModelSettings(name=str(tmp_path / "stopped" / "model"), device="cpu"))
    torch.testing.assert_close(logits(whole), logits(straight.model), atol=1e-3, rtol=1e-3)
    step = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped" / "checkpoints" / "step-3" / "model")
    assert torch.equal(logits(step), logits(whole))

    alone, _ = train("alone", 1, **{"model.lora.save": "adapter"})
    base, _ = load_model(ModelSettings(name="tiny", device="cpu"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "alone" / "model")
    torch.testing.assert_close(logits(loaded), logits(alone.model), atol=1e-5, rtol=1e-5)
