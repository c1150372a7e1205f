"""Replaces the attention of an unchanged Hugging Face module, to run it over packed sequences and our own caches.

transformers looks up the attention function by name in every layer. Inside `attending(model, attend)` the name is
`dapo` and the function is `attend`; outside, the module is as it was loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface

NAME = "dapo"


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer over a row of T tokens that belong to any number of sequences: from the number of the layer,
queries `[T, H, D]` with H heads, keys and values with K, each D wide (H is a multiple of K), and the scale of their
products; returns `[T, H, D]`."""


class UnsupportedAttentionError(Exception):
    """The module needs something other than plain causal attention."""


def depends_on_neighbours(model: Any, longest: int) -> str | None:
    """Why the result for a sequence depends on its length or on the other sequences in the batch, if it does; a test
    on short sequences does not show that."""
    config = model.config.get_text_config()
    if 0 < (getattr(config, "attention_chunk_size", None) or 0) < longest:
        return f"attention in chunks of {config.attention_chunk_size} tokens"
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = settings.get("rope_type")
        made_for: int = getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            made_for = settings.get("original_max_position_embeddings") or original or made_for
        if kind in ("dynamic", "longrope") and longest > made_for:
            return f"{kind} positions, which change for all sequences when one is beyond {made_for} tokens"
    return None


_current: Attend | None = None
_current_reach = 0
# transformers creates no mask, because no mask function is registered under this name.


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: `[1, heads, T, D]` in, `[1, T, heads, D]` out."""
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise UnsupportedAttentionError(f"attention with {name}")
    window = more.get("sliding_window")
    if window is not None and window < _current_reach:
        raise UnsupportedAttentionError(f"a sliding window of {window} tokens in a context of {_current_reach}")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError("attention that is not causal")
    if _current is None:
        raise RuntimeError("the attention of dapo_rl.models.attention, called outside attending()")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast, values have the autocast type, but rotary embeddings leave queries and keys in float32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return _current(module.layer_idx, q, k, v, scale)[None], None


AttentionInterface.register(NAME, _attention)


_configs_of: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _configs(model: Any) -> list[Any]:
    """Every config object from which a part of the model reads the name of its attention."""
    if model not in _configs_of:
        found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        _configs_of[model] = list(found.values())
    return _configs_of[model]


@contextmanager
def attending(model: Any, attend: Attend, reach: int) -> Iterator[None]:
    """Runs the module's attention through `attend`; `reach` is the longest context it will see.

    A backward pass that recomputes activations calls the attention again, so it must run inside too.
    """
    global _current, _current_reach
    configs = _configs(model)
    before = [(config, getattr(config, "_attn_implementation", None)) for config in configs]
    outer = (_current, _current_reach)
    _current, _current_reach = attend, reach
    for config, _ in before:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        _current, _current_reach = outer
        for config, name in before:
            config._attn_implementation = name
