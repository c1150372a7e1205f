"""The forward pass of a decoder on a CPU without the calls around its operations.

A token of a small model takes a few hundred operations of microseconds. Called through transformers, more than half of
the time goes to modules that call modules. Here the same operations of the same modules are called one after the
other, with the same results bit for bit; a model for which that is not so is called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_rl.engines.native.decode import next_logits
from dapo_rl.models.attention import Attend

_TOP = {"model", "lm_head"}
_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class DirectForward:
    """Llama and its relatives: norms before attention and feed-forward layers, gated activations, rotary positions."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed, self._rotary, self._norm, self._head = (
            inner.embed_tokens,
            inner.rotary_emb,
            inner.norm,
            model.lm_head,
        )
        self._layers = [
            (
                *(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm),
                *(getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
                *(getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")),
                *(getattr(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")),
            )
            for layer in inner.layers
        ]

    def __call__(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The logits of packed tokens, as `next_logits` has them."""
        x_1TC = self._embed.forward(ids_T[None])
        cos_1TD, sin_1TD = self._rotary.forward(x_1TC, positions_T[None].long())
        cos, sin = cos_1TD[:, :, None], sin_1TD[:, :, None]
        for before, attention, between, to_q, to_k, to_v, to_out, q_norm, k_norm, gate, up, down, act in self._layers:
            h_1TC = before.forward(x_1TC)
            heads = (*h_1TC.shape[:-1], -1, attention.head_dim)
            q, k, v = (part.forward(h_1TC).view(heads) for part in (to_q, to_k, to_v))
            if q_norm is not None:
                q, k = q_norm.forward(q), k_norm.forward(k)
            q, k = (x * cos + _rotated(x) * sin for x in (q, k))
            out = attend(attention.layer_idx, q[0], k[0], v[0], attention.scaling)
            x_1TC = x_1TC + to_out.forward(out.reshape(*h_1TC.shape[:-1], -1))
            h_1TC = between.forward(x_1TC)
            x_1TC = x_1TC + down.forward(act.forward(gate.forward(h_1TC)) * up.forward(h_1TC))
        logits_1TV: Tensor = self._head.forward(self._norm.forward(x_1TC))
        return logits_1TV[0]


def direct_forward(model: Any) -> DirectForward | None:
    """The forward pass of a model that has this form and gives the same numbers."""
    if not _has_the_form(model):
        return None
    direct = DirectForward(model)
    try:
        same = _is_same(model, direct)
    except Exception:  # another version of transformers
        return None
    return direct if same else None


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _has_the_form(model: Any) -> bool:
    if _parts(model) != _TOP or _parts(model.model) != _MODEL:
        return False
    for layer in model.model.layers:
        if _parts(layer) != _LAYER or _parts(layer.mlp) != _MLP:
            return False
        attention = layer.self_attn
        if _parts(attention) not in (_ATTENTION, _ATTENTION | _NORMS) or getattr(attention, "sliding_window", None):
            return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _parts(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


@torch.inference_mode()
def _is_same(model: Any, direct: DirectForward) -> bool:
    """Whether both give the same logits, bit for bit, with an attention that depends on all it is given."""

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        k, v = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_TKD, v_TKD))
        return (scale * q_THD * k + (layer + 1) * v).tanh()

    ids_T = torch.arange(7) % direct._embed.weight.shape[0]
    positions_T = torch.tensor([0, 1, 2, 5, 0, 9, 3])
    return torch.equal(direct(ids_T, positions_T, attend), next_logits(model, ids_T, positions_T, attend, 10))
