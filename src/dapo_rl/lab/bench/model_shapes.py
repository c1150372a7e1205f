"""Models of known shapes with random weights, so that benchmarks download nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import find_model, load_model, pick_device

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
}
"""The parts of the published configurations that affect the computation."""

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def open_model(name: str, dtype: torch.dtype, device: str, seed: int) -> tuple[Any, Any]:
    """A shape with random weights, or a model as in `model.name`, and its tokenizer."""
    if name not in SHAPES:
        model, tokenizer = load_model(ModelSettings(name=name, device=device))  # type: ignore[arg-type]
        return model.to(dtype), tokenizer
    torch.manual_seed(seed)
    with torch.device(pick_device(device)):
        model = AutoModelForCausalLM.from_config(shape_config(name), dtype=dtype, trust_remote_code=False)
    return model.eval(), synthetic_tokenizer(SHAPES[name]["vocab_size"])


def shape_config(name: str) -> Any:
    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def check_model(name: str) -> None:
    """Rejects a directory that is not there, and a misspelt shape, which would otherwise be looked up on the hub."""
    if name in SHAPES or name == "tiny":
        return
    if "/" in name or Path(name).expanduser().exists():
        find_model(name)
        return
    hint = did_you_mean(nearest(name, [*SHAPES, "tiny"]), f"shapes are {', '.join([*SHAPES, 'tiny'])}")
    raise UserError(f"--model: {name} is neither a shape, nor a directory, nor a hub name (owner/name){hint}")


def synthetic_tokenizer(size: int) -> Any:
    """A tokenizer with a word per token, `t3 t4 t5 …`, so that any ids survive decoding and encoding."""
    vocabulary = {PAD: 0, BOS: 1, EOS: 2} | {f"t{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)
