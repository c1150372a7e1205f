"""Dropout, rsLoRA and DoRA: engines sample from what is trained, masks repeat exactly, and peft loads what is saved."""

import copy
from types import MappingProxyType

import numpy as np
import pytest
import torch
from support import all_weights, small_model, tokenizer, train_sample

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.config import AlgoSettings, LoraSettings, ModelSettings, TrainSettings
from dapo_rl.models.lora import add_lora, base_of, dropping_out, lora_settings, merged_copy, plain_weights, save_adapter
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.run.model import with_lora
from dapo_rl.train.policy import HFPolicy

peft = pytest.importorskip("peft")

PROMPT = tuple(range(40, 52))
SAMPLES = [train_sample(PROMPT, tuple(range(60 + i, 70 + i)), (-3.0,) * 10, (-1.0) ** i, 0) for i in range(4)]
VARIANTS = [{"use_rslora": True}, {"use_dora": True}, {"use_rslora": True, "use_dora": True}]


def policy_of(settings, model=None, seed=0, budget=10**6, **train):
    lora = LoraSettings(**({"rank": 4, "alpha": 8, **settings}))
    if model is None:
        model = small_model()
        add_lora(model, lora, 0)
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(lr=1e-2, weight_decay=0.0, **train),
        norm_length=20,
        token_budget=budget,
        settings=ModelSettings(lora=lora),
        tokenizer=tokenizer(),
        seed=seed,
    )


def logits(model):
    ids = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def plain(model):
    """A model without adapters, with the weights that engines receive."""
    result = small_model()
    result.load_state_dict(dict(plain_weights(model)), strict=False)
    return result


@pytest.mark.parametrize("settings", VARIANTS)
def test_new_adapters_change_nothing(settings):
    torch.testing.assert_close(logits(policy_of(settings).model), logits(small_model()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", VARIANTS)
def test_merged_weights_compute_what_is_trained(settings):
    policy = policy_of(settings)
    for _ in range(3):
        policy.update(SAMPLES, lr=1e-2)
        assert (logits(policy.model) - logits(small_model())).abs().max() > 0.05
        torch.testing.assert_close(logits(plain(policy.model)), logits(policy.model), atol=1e-4, rtol=1e-4)
    assert list(all_weights(policy.weights())) == [name for name, _ in small_model().named_parameters()]
    peft_merges = merged_copy(policy.model)
    for (name, ours), (_, theirs) in zip(plain_weights(policy.model), peft_merges.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=name)


def test_rslora_scales_by_the_root_of_the_rank():
    layer = policy_of({"use_rslora": True}).model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 8 / 4**0.5


def test_dora_trains_lengths():
    before = policy_of({"use_dora": True}).model.state_dict()
    policy = policy_of({"use_dora": True})
    policy.update(SAMPLES, lr=1e-2)
    lengths = [name for name in before if "lora_magnitude_vector" in name]
    assert len(lengths) == 14
    assert not any(torch.equal(before[name], policy.model.state_dict()[name]) for name in lengths)


@pytest.mark.parametrize("settings", [*VARIANTS, {"dropout": 0.3}])
def test_an_adapter_is_one_that_peft_loads(settings, tmp_path):
    policy = policy_of(settings)
    policy.update(SAMPLES, lr=1e-2)
    lora = policy._settings.lora
    save_adapter(policy.model, tokenizer(), lora, "the/base", tmp_path)
    loaded = peft.PeftModel.from_pretrained(small_model(), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(policy.model), atol=1e-5, rtol=1e-5)
    expected = (settings.get("dropout", 0.0), settings.get("use_rslora", False), settings.get("use_dora", False))
    config = loaded.peft_config["default"]
    assert (config.lora_dropout, config.use_rslora, config.use_dora) == expected
    assert lora_settings(config, base_of(loaded)).use_dora == lora.use_dora


class TestDropout:
    settings = MappingProxyType({"dropout": 0.5})

    def moved(self):
        """Adapters away from zero, where dropout shows."""
        policy = policy_of(self.settings)
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(2))
        return policy

    def gradients(self, policy):
        policy.update(SAMPLES, lr=0.0)
        return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]

    def test_scores_and_weights_have_none(self):
        policy = self.moved()
        without = policy_of({}, copy.deepcopy(policy.model))
        assert all(map(np.array_equal, policy.score(SAMPLES), without.score(SAMPLES)))
        policy.update(SAMPLES, lr=0.0)
        assert all(map(np.array_equal, policy.score(SAMPLES), policy.score(SAMPLES)))
        assert not any(module.training for module in policy.model.modules())
        torch.testing.assert_close(logits(plain(policy.model)), logits(policy.model), atol=1e-4, rtol=1e-4)

    def test_updates_have_it(self):
        policy = self.moved()
        without = policy_of({}, copy.deepcopy(policy.model))
        ours, plain_ones = self.gradients(policy), self.gradients(without)
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(ours, plain_ones, strict=True))

    def test_masks_follow_the_seed_and_the_update(self):
        start = self.moved().model
        first = self.gradients(policy_of(self.settings, copy.deepcopy(start)))
        again = self.gradients(policy_of(self.settings, copy.deepcopy(start)))
        other = self.gradients(policy_of(self.settings, copy.deepcopy(start), seed=1))
        assert all(map(torch.equal, first, again))
        assert not all(map(torch.equal, first, other))
        policy = policy_of(self.settings, copy.deepcopy(start))
        self.gradients(policy)
        assert not all(map(torch.equal, first, self.gradients(policy)))

    def test_other_random_numbers_go_on_as_without(self):
        policy = self.moved()
        torch.manual_seed(3)
        wanted = torch.rand(4)
        torch.manual_seed(3)
        policy.update(SAMPLES, lr=0.0)
        assert torch.equal(torch.rand(4), wanted)

    @pytest.mark.parametrize("packed", [True, False])
    def test_recomputed_layers_have_the_same_masks(self, packed):
        start = self.moved().model
        kept, recomputed = (
            self.gradients(policy_of(self.settings, copy.deepcopy(start), gradient_checkpointing=again, packed=packed))
            for again in (False, True)
        )
        for a, b in zip(kept, recomputed, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)

    def test_a_resumed_policy_goes_on_exactly(self, tmp_path):
        straight, stopped = policy_of(self.settings), policy_of(self.settings)
        for _ in range(2):
            straight.update(SAMPLES, lr=1e-2)
            stopped.update(SAMPLES, lr=1e-2)
        stopped.save(tmp_path)(lambda: False)
        resumed = policy_of(self.settings)
        resumed.load(tmp_path)
        for policy in (straight, resumed):
            policy.update(SAMPLES, lr=1e-2)
        assert all(map(torch.equal, straight.model.state_dict().values(), resumed.model.state_dict().values()))

    def test_dora_with_dropout(self):
        policy = policy_of({"dropout": 0.5, "use_dora": True}, gradient_checkpointing=True)
        policy.update(SAMPLES, lr=1e-2)
        torch.testing.assert_close(logits(plain(policy.model)), logits(policy.model), atol=1e-4, rtol=1e-4)

    def test_the_block_ends_after_an_error(self):
        model = self.moved().model
        with pytest.raises(RuntimeError), dropping_out(model, 3):
            raise RuntimeError
        assert not any(module.training for module in model.modules())


def test_a_lora_config_is_carried_over():
    config = peft.LoraConfig(lora_dropout=0.1, use_rslora=True, use_dora=True)
    lora = lora_settings(config, small_model())
    assert (lora.dropout, lora.use_rslora, lora.use_dora) == (0.1, True, True)


@pytest.mark.parametrize(("key", "value"), [("dropout", "0.1"), ("use_dora", "true")])
def test_ranks_refuse_what_they_cannot_do(key, value):
    ray = ["model.lora.rank=4", "cluster.backend=ray"]
    with pytest.raises(UserError, match=rf"^model\.lora\.{key}: .* is not supported on ranks; leave it out, or train"):
        Config.load(None, [*ray, f"model.lora.{key}={value}"])
    assert Config.load(None, [*ray, "model.lora.use_rslora=true"]).model.lora.use_rslora
    given = TrainerInputs(peft_config=peft.LoraConfig(lora_dropout=0.1, use_dora=True))
    with pytest.raises(UserError, match=r"^model\.lora\.dropout: 0.1 is not supported on ranks"):
        with_lora(Config.load(None, ["cluster.backend=ray"]), given, small_model())


@pytest.mark.parametrize("value", ["1", "-0.1", "many"])
def test_a_dropout_that_cannot_be(value):
    with pytest.raises(UserError, match=r"^model\.lora\.dropout: "):
        Config.load(None, [f"model.lora.dropout={value}"])


SMALL = {
    "model.lora": {"rank": 4, "alpha": 8, "dropout": 0.2, "use_dora": True, "use_rslora": True},
    "data.train": {"source": "arithmetic", "size": 64},
    "data.max_prompt_tokens": 32,
    "sampling": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 48},
    "model.dtype": "float32",
    "train": {"lr": 1e-2, "warmup_steps": 0},
    "checkpoint.every": 1,
    "log.report": False,
}


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    def train(run, steps, resume=False):
        trainer = DAPOTrainer(config={**SMALL, "train.steps": steps}, run_dir=tmp_path / run)
        trainer.train(resume=resume)
        return trainer

    straight = train("straight", 3)
    train("stopped", 1)
    resumed = train("stopped", 3, resume=True)
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
