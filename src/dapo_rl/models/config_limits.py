"""Refuses a config.json with sizes that no model has: transformers would build a million layers one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_rl.errors import UserError

LARGEST_FILE = 32 << 20
LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 2048, 1 << 20, 1 << 16, 1 << 24, 1 << 28
"""Far beyond the largest models."""
MOST_EXPERTS = 1 << 18
"""Over all layers."""
LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_nextn_predict_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "d_ff", "head_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), HEADS),
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
}


def check_config_size(path: str | Path) -> None:
    """Raises a UserError if the config.json of a directory is too large to be one."""
    file = Path(path) / "config.json"
    if file.is_file() and file.stat().st_size > LARGEST_FILE:
        raise UserError(f"model.name: {file} has more than {LARGEST_FILE >> 20} MiB; it is not the config of a model")


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Raises a UserError that names the first key whose value cannot be real."""
    layers: float = 1
    experts: float = 1
    for key, value in _numbers(config):
        limit = LIMITS.get(key)
        if limit is not None and value > limit:
            raise UserError(f"model.name: {name}: config.json says {key} {value:,}, and no model has over {limit:,}")
        layers = max(layers, value) if limit == LAYERS else layers
        experts = max(experts, value) if key.endswith("experts") and limit is not None else experts
    if layers * experts > MOST_EXPERTS:
        raise UserError(
            f"model.name: {name}: config.json says {layers:,} layers of {experts:,} experts; no model has both"
        )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by key, also those of nested configs (`text_config`)."""
    waiting: list[Any] = [config]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield key, value
