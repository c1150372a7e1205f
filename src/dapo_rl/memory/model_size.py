"""The sizes of a model that determine its memory: from a loaded model, or from its config.json without its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.config import LoraSettings
from dapo_rl.errors import UserError
from dapo_rl.models.config_limits import check_config
from dapo_rl.models.download import PRETRAINED


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    hidden: int
    """Width of the residual stream."""
    inner: int
    """Width of the feed-forward layer; for a mixture of experts, of those that a token uses."""
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """The size of a model, from its parameters and its config; raises an AttributeError for an unusual config."""
        text = model.config.get_text_config()
        heads, hidden = text.num_attention_heads, text.hidden_size
        experts = getattr(text, "num_experts_per_tok", None) or 1
        inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * hidden
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            hidden=hidden,
            inner=inner * experts,
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_width=getattr(text, "head_dim", None) or hidden // heads,
            vocabulary=text.vocab_size,
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def body(self) -> int:
        """Parameters apart from the output layer; with tied embeddings, apart from both."""
        return self.parameters - self.head

    def layer_bytes(self, bfloat16: bool) -> int:
        """Activations of one layer per token. In bfloat16 under autocast: the residual stream and the output of each
        norm in float32, a bfloat16 copy of it for each of the five products that read it, queries, keys, values, the
        attention's output, and four tensors of the feed-forward layer."""
        if bfloat16:
            return 26 * self.hidden + 4 * self.queries + 4 * self.keys + 8 * self.inner
        return 24 * self.hidden + 8 * self.queries + 8 * self.keys + 16 * self.inner

    def adapter_parameters(self, lora: LoraSettings) -> int:
        """The trained parameters of LoRA adapters on the named layers."""
        sides = {
            "q_proj": self.hidden + self.queries,
            "k_proj": self.hidden + self.keys,
            "v_proj": self.hidden + self.keys,
            "o_proj": self.queries + self.hidden,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.inner),
        }
        named = sides if isinstance(lora.targets, str) else {n: sides[n] for n in lora.targets if n in sides}
        return self.layers * lora.rank * sum(named.values())


KNOWN: Mapping[str, ModelSize] = {
    "qwen2.5-0.5b": ModelSize(494_032_768, 896, 4864, 24, 14, 2, 64, 151_936),
    "qwen2.5-1.5b": ModelSize(1_543_714_304, 1536, 8960, 28, 12, 2, 128, 151_936),
    "qwen2.5-3b": ModelSize(3_085_938_688, 2048, 11008, 36, 16, 2, 128, 151_936),
    "qwen2.5-7b": ModelSize(7_615_616_512, 3584, 18944, 28, 28, 4, 128, 152_064),
    "qwen2.5-14b": ModelSize(14_770_033_664, 5120, 13824, 48, 40, 8, 128, 152_064),
    "qwen2.5-32b": ModelSize(32_763_876_352, 5120, 27648, 64, 40, 8, 128, 152_064),
    "qwen2.5-72b": ModelSize(72_706_203_648, 8192, 29568, 80, 64, 8, 128, 152_064),
    "smollm2-135m": ModelSize(134_515_008, 576, 1536, 30, 9, 3, 64, 49_152),
}
"""Published models whose size is known without a network, by name without `-Coder`, `-Math` and `-Instruct`, which have
the same shape."""


def size_of(name: str) -> ModelSize:
    """The size of the model that `model.name` names; raises a UserError if it is unknown.

    A model on the hub is looked up in the local cache and in `KNOWN`. The hub itself is not asked: without a network
    that takes half a minute.
    """
    from dapo_rl.models.load import find_model

    known = KNOWN.get(re.sub(r"-(instruct|base)$|-(coder|math)(?=-)", "", Path(name).name.lower()))
    try:
        path = find_model(name)
    except UserError:
        if name in PRETRAINED and known:
            return known
        raise
    if known and not isinstance(path, Path):
        return known
    try:
        from transformers import AutoConfig, PreTrainedConfig

        check_config(PreTrainedConfig.get_config_dict(path, local_files_only=True)[0], name)
        return count_parameters(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))
    except UserError:
        raise
    except Exception as error:  # a missing file, an unknown architecture, a damaged config: each raises another type
        if isinstance(path, Path):
            raise UserError(f"model.name: the size of {name} is unknown: {one_line(error, 120)}") from None
        why = f"its config.json is not in the local cache of the hub; hf download {name} config.json puts it there"
        raise UserError(f"model.name: the size of {name} is unknown: {why}") from None


def classifier_parameters(name: str) -> int:
    """The parameters of a reward model, or 0 if they are unknown: a loaded one may have no name."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig

    from dapo_rl.models.load import find_model

    try:
        path = find_model(name)
        check_config(PreTrainedConfig.get_config_dict(path, local_files_only=True)[0], name)
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    except Exception:  # a missing file, an unknown architecture, a damaged config: the run says so
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def count_parameters(config: Any) -> ModelSize:
    """The size of a model with this config. Its parameters are counted on the meta device, which holds no data."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return ModelSize.of(model)
