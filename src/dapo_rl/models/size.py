"""The sizes of a model that determine its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dapo_rl.config import LoraSettings


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
        """Width of the queries of a layer."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of the keys of a layer, and of its values."""
        return self.kv_heads * self.head_width

    @property
    def head(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def body(self) -> int:
        """Parameters apart from the output layer; with tied embeddings, apart from both."""
        return self.parameters - self.head

    def layer_bytes(self, bfloat16: bool) -> int:
        """Activations of one layer per token."""
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
