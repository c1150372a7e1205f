"""The decode step on a CPU: one token for every row. Rows are the first n slots, so the cache is read in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dapo_rl.models.attention import Attend, attending
from dapo_rl.rollout.draw import draw_tokens, uniforms
from dapo_rl.rollout.native.cache import KVCache
from dapo_rl.rollout.native.state import SlotState


def next_logits(model: Any, ids_T: Tensor, positions_T: Tensor, attend: Attend, reach: int, keep: Any = 0) -> Tensor:
    """The logits of packed tokens, or of those that `keep` indexes, computed with the attention `attend`."""
    with attending(model, attend, reach):
        output = model(
            input_ids=ids_T[None], position_ids=positions_T[None].long(), use_cache=False, logits_to_keep=keep
        )
    logits: Tensor = output.logits[0]
    return logits


def eager_step(model: Any, cache: KVCache, state: SlotState, rows: int, truncates: bool, is_stop_V: Tensor) -> None:
    positions_B = state.position[:rows].long()
    attend = CachedAttention(cache, torch.arange(rows), positions_B)
    logits_BV = next_logits(model, state.last_token[:rows], positions_B, attend, attend.reach)
    uniforms_B = uniforms(state.key[:rows], state.generated[:rows])
    tokens_B, logps_B = draw_tokens(logits_BV, uniforms_B, state.how(slice(0, rows), truncates))
    state.advance(torch.arange(rows), tokens_B, logps_B, is_stop_V, cached=1)


class CachedAttention:
    """Each row's new token attends to its slot's cache and to itself. Row i is slot i."""

    def __init__(self, cache: KVCache, slots_B: Tensor, positions_B: Tensor) -> None:
        self._cache, self._rows_B, self._positions_B = cache, slots_B, positions_B
        self.reach = int(positions_B.max()) + 1
        beyond_BL = torch.arange(self.reach) > positions_B[:, None]
        self._mask_B11L = torch.zeros(beyond_BL.shape).masked_fill_(beyond_BL, -torch.inf)[:, None, None]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        self._cache.put(layer, self._rows_B, self._positions_B, k_TKD, v_TKD)
        rows, heads, width = q_THD.shape
        keys = self._cache.keys[layer][:rows, :, : self.reach]
        values = self._cache.values[layer][:rows, :, : self.reach]
        # Query heads that share a key-value head become queries of one sequence, so keys need not be repeated.
        q_BKRD = q_THD.reshape(rows, keys.shape[1], -1, width).to(keys.dtype)
        out_BKRD = F.scaled_dot_product_attention(q_BKRD, keys, values, attn_mask=self._mask_B11L, scale=scale)
        return out_BKRD.reshape(rows, heads, -1).to(q_THD.dtype)
