"""Loading: what is wrong with a model is one line, and what was loaded can be saved."""

import pytest
import torch
from support import small_model, tokenizer
from transformers import AutoModelForCausalLM

from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import TINY, check_context, describe, load_model, make_savable, save_model


def test_the_embedded_model_is_small_and_its_own():
    model, words = load_model(ModelSettings())
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (TINY / "model.safetensors").stat().st_size < 4_000_000
    assert describe(model) == "LlamaForCausalLM, 0.9 M parameters, float32 on cpu"
    ids = words("3+8-4+7=?\n").input_ids
    assert words.decode(ids, skip_special_tokens=True) == "3+8-4+7=?\n"
    assert len(ids) == len("3+8-4+7=?\n") + 1


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path):
    def message(name):
        with pytest.raises(UserError) as caught:
            load_model(ModelSettings(name=str(name)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert message(tmp_path / "emtpy").endswith(f"did you mean {tmp_path / 'empty'}?")
    assert "cannot be loaded" in message(tmp_path / "empty")
    save_model(small_model(), tokenizer(), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "cannot be loaded" in message(tmp_path / "cut")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(UserError, match=r"model.device: cuda is asked for"):
        load_model(ModelSettings(device="cuda"))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    save_model(small_model(), tokenizer(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        load_model(ModelSettings(name=str(tmp_path / "model")))


def test_a_contradictory_generation_config_can_still_be_saved(tmp_path):
    model = small_model()
    model.generation_config.temperature = 0.3
    with pytest.raises(UserError, match="cannot be saved"):
        save_model(model, tokenizer(), tmp_path / "a")
    make_savable(model)
    save_model(model, tokenizer(), tmp_path / "b")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "b").generation_config.temperature == 0.3


def test_a_file_is_no_place_for_a_model(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="there is a file of that name"):
        save_model(small_model(), tokenizer(), tmp_path / "file")


def test_samples_must_fit_the_model():
    check_context(small_model(), 100, 28)
    with pytest.raises(UserError, match="29 after a prompt of 100 tokens, and the model is made for 128"):
        check_context(small_model(), 100, 29)
