"""Loading: what is wrong with a model is one line, and what was loaded can be saved."""

import json

import pytest
import torch
from support import small_model, tokenizer
from transformers import AutoModelForCausalLM

from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models import load
from dapo_rl.models.load import (
    TINY,
    check_context,
    check_vocabulary,
    compute_dtype,
    copy_in,
    describe_model,
    load_model,
    make_savable,
    to_float32,
)
from dapo_rl.models.save import save_model


def test_the_embedded_model_is_small_and_its_own():
    model, words = load_model(ModelSettings())
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (TINY / "model.safetensors").stat().st_size < 4_000_000
    assert describe_model(model, torch.float32) == "LlamaForCausalLM, 0.9 M parameters, float32 on cpu"
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
    assert "has no config.json" in message(tmp_path / "empty")
    assert message("~nobody-at-all/model").endswith("no directory ~nobody-at-all/model")
    save_model(small_model(), tokenizer(), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "cannot be loaded" in message(tmp_path / "cut")


def test_weights_that_transformers_would_make_up_are_refused(tmp_path):
    """It fills in tensors that are missing, or of another shape, with random numbers."""

    def message(**changes):
        path = tmp_path / "-".join(changes)
        save_model(small_model(), tokenizer(), path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError) as caught:
            load_model(ModelSettings(name=str(path)))
        return str(caught.value).replace(str(path), "it")

    assert message(num_hidden_layers=3) == (
        "model.name: it has no weights for 9 of its 29 tensors (model.layers.2.input_layernorm.weight); "
        "its config.json may belong to another model"
    )
    assert message(intermediate_size=48) == (
        "model.name: the weights of it do not match its config.json: model.layers.0.mlp.down_proj.weight is 32 × 64, "
        "and config.json says 32 × 48"
    )
    assert "no weights for 1 of its 21 tensors (lm_head.weight)" in message(tie_word_embeddings=False)


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    model = small_model()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    save_model(model, tokenizer(), tmp_path)
    with pytest.raises(UserError, match=r"are damaged: model\.norm\.weight has numbers that are not finite"):
        load_model(ModelSettings(name=str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(UserError, match=r"model.device: cuda was requested"):
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
    with pytest.raises(UserError, match="but this is a file"):
        save_model(small_model(), tokenizer(), tmp_path / "file")


def test_samples_must_fit_the_model():
    check_context(small_model(), 100, 28)
    with pytest.raises(UserError, match="29 after a prompt of 100 tokens exceeds the model's context of 128"):
        check_context(small_model(), 100, 29)


def test_weights_are_float32_whatever_is_computed_in():
    for dtype in ("auto", "float32", "bfloat16"):
        model, _ = load_model(ModelSettings(dtype=dtype, device="cpu"))
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flags : fma avx512f avx512_bf16 sse4_2\n", torch.bfloat16),
        ("flags : amx_tile amx_bf16\n", torch.bfloat16),
        ("Features : fp asimd sve bf16 i8mm\n", torch.bfloat16),
        ("Features : fp asimd svebf16x\n", torch.float32),
        (None, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_cores_multiply_it(words, expected, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(words or "")
    monkeypatch.setattr(load, "CPU_FEATURES", tmp_path / ("cpuinfo" if words else "missing"))
    assert compute_dtype(ModelSettings(), torch.device("cpu")) == expected
    assert compute_dtype(ModelSettings(dtype="float32"), torch.device("cpu")) == torch.float32
    assert compute_dtype(ModelSettings(dtype="bfloat16"), torch.device("cpu")) == torch.bfloat16


def test_narrow_weights_become_float32_and_it_is_said():
    model = small_model()
    assert to_float32(model) is None
    model.bfloat16()
    assert "bfloat16 weights are trained in float32" in to_float32(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_tokenizer_of_another_model_is_found_before_the_run():
    model = small_model()
    rows = model.get_input_embeddings().weight.shape[0]
    check_vocabulary(model, rows - 1)
    with pytest.raises(UserError, match=rf"the tokenizer produces token {rows}, but the model has {rows}"):
        check_vocabulary(model, rows)


@pytest.mark.parametrize("tied", [True, False])
def test_a_copy_in_another_type(tied):
    model = small_model(tie_word_embeddings=tied)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    copied = copy_in(model, torch.bfloat16)
    assert (copied.get_output_embeddings().weight is copied.get_input_embeddings().weight) is tied
    for (name, theirs), ours in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name
        assert (ours.dtype, ours.requires_grad, theirs.dtype) == (torch.bfloat16, False, torch.float32)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in copied.named_buffers())
    same = copy_in(model, torch.float32)
    with torch.no_grad():
        next(same.parameters()).zero_()
    assert next(model.parameters()).any()
