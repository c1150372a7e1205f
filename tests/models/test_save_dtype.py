"""Models are saved in the type they came in; a checkpoint keeps the float32 weights too."""

import json

import pytest
import torch
from safetensors import safe_open
from support import small_model, tokenizer
from transformers import AutoModelForCausalLM

from dapo_rl.config import AlgoSettings, ModelSettings, TrainSettings
from dapo_rl.models.load import load_model, saved_dtype, stored_dtype
from dapo_rl.models.save import WEIGHTS, save_model
from dapo_rl.train.checkpoint import Checkpoints
from dapo_rl.train.policy import HFPolicy


def policy_saving(model, dtype):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(),
        train=TrainSettings(packed=False),
        norm_length=20,
        token_budget=10**6,
        tokenizer=tokenizer(),
        save_dtype=dtype,
    )


def dtypes(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float32])
def test_the_type_of_a_directory_is_that_of_its_weights(tmp_path, came):
    save_model(small_model().to(came), tokenizer(), tmp_path)
    assert stored_dtype(str(tmp_path)) == came
    model, _ = load_model(ModelSettings(name=str(tmp_path), device="cpu"))
    assert model.dtype == torch.float32, "it is trained in float32"
    assert saved_dtype(ModelSettings(), came) == came
    assert saved_dtype(ModelSettings(save_dtype="float32"), came) == torch.float32
    assert saved_dtype(ModelSettings(save_dtype="bfloat16"), came) == torch.bfloat16


def test_the_embedded_model_is_saved_in_float32():
    assert stored_dtype("tiny") == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_bfloat16_resumes_in_float32(tmp_path, tied):
    model = small_model(seed=1, tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-7)
    policy = policy_saving(model, torch.bfloat16)
    policy.export(tmp_path / "exported")
    path = Checkpoints(tmp_path / "c", 1).save(1, [policy]).path
    for directory in (path / "model", tmp_path / "exported"):
        assert dtypes(directory) == {torch.bfloat16}
        assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
        for (name, own), (_, saved) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
            assert torch.equal(own.bfloat16(), saved), name
    assert (path / WEIGHTS).exists()
    resumed = small_model(seed=2, tie_word_embeddings=tied)
    assert Checkpoints(tmp_path / "c", 1).restore([policy_saving(resumed, torch.bfloat16)]).step == 1
    for (name, own), (_, same) in zip(model.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(own, same), name
    assert model.dtype == torch.float32
