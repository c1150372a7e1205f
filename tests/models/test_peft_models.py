"""peft's configurations and models: plain LoRA is trained, anything else is refused by name."""

import copy

import pytest
import torch
from support import small_model, tokenizer
from transformers import LlamaForCausalLM

from dapo_rl import Config, UserError
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.lora import (
    base_of,
    has_lora,
    is_adapted,
    lora_settings,
    merged_copy,
    peft_config_of,
    plain_weights,
    train_adapters,
)
from dapo_rl.models.save import StoredModel, save_model
from dapo_rl.run.backend import LoadedModel, build_local_engine, prepare_lora
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.run.model import model_and_tokenizer, with_lora
from dapo_rl.train.reference import build_reference

peft = pytest.importorskip("peft")


def adapters(model, **settings):
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **settings}))
    for name, parameter in wrapped.named_parameters():
        if ".lora_B." in name:  # away from zero, as after training
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return wrapped


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40, 60)[None]).logits


def test_a_model_in_training_mode_is_sampled_and_copied_without_dropout():
    inputs = TrainerInputs(model=small_model().train(), processing_class=tokenizer())
    model, _ = model_and_tokenizer(Config(), inputs, torch.device("cpu"), load=None)
    assert model is inputs.model
    assert not any(module.training for module in model.modules())


def test_a_lora_config_becomes_settings():
    lora = lora_settings(peft.LoraConfig(r=8, lora_alpha=4, target_modules=["v_proj", "q_proj"]), small_model())
    assert (lora.rank, lora.alpha, lora.targets) == (8, 4.0, ("q_proj", "v_proj"))
    usual = lora_settings(peft.LoraConfig(task_type="CAUSAL_LM"), small_model())
    assert (usual.rank, usual.alpha, usual.targets) == (8, 8.0, ("q_proj", "v_proj")), "peft's choice for Llama"
    assert lora_settings(peft.LoraConfig(target_modules="all-linear"), small_model()).targets == "all-linear"


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (
            {"modules_to_save": ["lm_head"]},
            "modules_to_save=.*: adapters are all that is trained; leave it out to train without it",
        ),
        (
            {"rank_pattern": {"q_proj": 2}},
            "rank_pattern=.*: adapters are LoRA on linear layers, from their usual start",
        ),
        ({"bias": "all"}, "bias='all': adapters are LoRA on"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights='gaussian': adapters are LoRA on"),
        ({"task_type": "SEQ_CLS"}, "task_type=SEQ_CLS: models are causal language models"),
        ({"lora_alpha": 0}, "lora_alpha=0: Input should be greater than 0$"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0: Input should be less than 1$"),
    ],
)
def test_what_plain_lora_does_not_do_is_refused_by_name(field, why):
    with pytest.raises(UserError, match=f"^peft_config: {why}"):
        lora_settings(peft.LoraConfig(**field), small_model())


def test_other_kinds_of_adapters_are_refused():
    with pytest.raises(UserError, match=r"peft_config: IA3Config \(IA3\): adapters are LoRA; give a LoraConfig"):
        lora_settings(peft.IA3Config(), small_model())
    with pytest.raises(UserError, match="model: its adapters are IA3, and LoRA is what can be trained"):
        peft_config_of(base_of(peft.get_peft_model(small_model(), peft.IA3Config(task_type="CAUSAL_LM"))))
    two = adapters(small_model())
    two.add_adapter("other", peft.LoraConfig())
    with pytest.raises(UserError, match="model: its adapters are default, other; one that is named default"):
        peft_config_of(base_of(two))


def test_a_peft_model_is_sampled_from_with_its_adapters_merged():
    base = small_model()
    wrapped = adapters(copy.deepcopy(base))
    model = base_of(wrapped)
    config = with_lora(Config(), TrainerInputs(model=wrapped), model)
    lora = config.model.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.save) == (4, 8.0, ("q_proj", "v_proj"), "adapter")
    before = logits(wrapped)
    assert (before - logits(base)).abs().max() > 0.1
    loaded = LoadedModel(model, tokenizer(), 64, 64, torch.float32, torch.float32)
    sampled = prepare_lora(config, loaded)
    engine = build_local_engine(config, TrainerInputs(model=wrapped), loaded, sampled, MemoryPlan())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert torch.equal(logits(wrapped), before), "building a run does not change it"
    plain = merged_copy(model)
    assert not has_lora(plain)
    assert torch.allclose(logits(plain), before, atol=1e-5)
    assert {name for name, _ in plain.named_parameters()} == {name for name, _ in base.named_parameters()}
    weights = dict(plain.named_parameters())
    assert all(torch.allclose(weights[name], tensor, atol=1e-6) for name, tensor in plain_weights(model))
    del engine


def reference_of(model):
    return build_reference(model, None, Config.load(None, ["algo.kl_coef=0.1"]), None)


def test_the_reference_is_the_policy_as_it_was_given():
    model = base_of(adapters(small_model()))
    before = logits(model)
    assert is_adapted(model)
    assert torch.allclose(logits(reference_of(model)), before, atol=1e-5)
    fresh = base_of(peft.get_peft_model(small_model(), peft.LoraConfig()))
    assert not is_adapted(fresh)
    assert reference_of(fresh) is fresh, "without its adapters it is the reference"


def test_adapters_are_given_once():
    wrapped = adapters(small_model())
    with pytest.raises(UserError, match="peft_config: the model already has LoRA adapters"):
        with_lora(Config(), TrainerInputs(model=wrapped, peft_config=peft.LoraConfig()), base_of(wrapped))
    twice = Config.build({"model.lora.rank": 8})
    with pytest.raises(UserError, match=r"only model\.lora\.save applies"):
        with_lora(twice, TrainerInputs(peft_config=peft.LoraConfig()), small_model())
    merged = Config.build({"model.lora.save": "merged"})
    assert with_lora(merged, TrainerInputs(peft_config=peft.LoraConfig()), small_model()).model.lora.save == "merged"


def test_adapters_that_transformers_has_added_are_saved_merged(tmp_path):
    """Its own `save_pretrained` would write adapters alone, and of merged weights nothing."""
    model = small_model()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    train_adapters(model)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    wanted = logits(model)
    save_model(model, tokenizer(), tmp_path / "saved")
    StoredModel(model, tokenizer()).save(tmp_path)(lambda: False)
    for path in (tmp_path / "saved", tmp_path / "model"):
        torch.testing.assert_close(logits(LlamaForCausalLM.from_pretrained(path)), wanted)
    assert model._hf_peft_config_loaded, "the model is the caller's"


def test_a_frozen_model_is_refused_unless_it_gets_adapters():
    """Before anything is sampled."""
    model = small_model().requires_grad_(False)
    with pytest.raises(UserError, match=r"^model: all of its weights are frozen"):
        with_lora(Config(), TrainerInputs(model=model), model)
    with_adapters = Config.build({"model.lora.rank": 2})
    assert with_lora(with_adapters, TrainerInputs(model=model), model) is with_adapters
    model.get_input_embeddings().weight.requires_grad_(True)
    with_lora(Config(), TrainerInputs(model=model), model)
