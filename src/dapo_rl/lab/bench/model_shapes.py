"""Models of known shapes with random weights, and prompts of random tokens: benchmarks download nothing."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dapo_rl.base.home import expanded
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import find_model, load_model, pick_device

_COLUMNS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "smollm2-135m": ("llama", 49152, 576, 1536, 30, 9, 3, 8192, 1e-5, 1e5, True),
    "llama-3.2-1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 131072, 1e-5, 5e5, True),
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, 1e-6, 1e6, True),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 32768, 1e-6, 1e6, True),
    "qwen2.5-3b": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 32768, 1e-6, 1e6, True),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, 1e-6, 1e6, False),
    "qwen2.5-32b": ("qwen2", 152064, 5120, 27648, 64, 40, 8, 32768, 1e-6, 1e6, False),
}
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _ROWS.items()}
"""The parts of the published configurations that affect the computation."""

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ATTEMPTS = 20
"""How often a random text is extended until it has the wanted number of tokens."""


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
    if "/" in name or expanded(name).exists():
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


def random_prompts(tokenizer: Any, count: int, length: int, seed: int) -> list[str]:
    """Distinct prompts of a given length, as text, so that every contender reads the same tokens."""
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    plain = [i for i in range(min(len(tokenizer), 50_000)) if i not in special]
    return [_random_text(tokenizer, plain, length, rng) for _ in range(count)]


def _random_text(tokenizer: Any, plain: list[int], length: int, rng: random.Random) -> str:
    """A text of `length` tokens, or slightly fewer if the tokenizer keeps merging random pieces."""
    text, added = "", len(tokenizer("").input_ids)
    ids: list[int] = []
    for _ in range(ATTEMPTS):
        ids = ids[: length - added] + [rng.choice(plain) for _ in range(length - added - len(ids))]
        text = tokenizer.decode(ids)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) + added == length:
            break
    return text
