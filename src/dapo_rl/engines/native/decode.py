"""The decode step on a CPU: one token for every row. Rows are the first n slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dapo_rl.engines.native.cache import KVCache
from dapo_rl.engines.native.pages import Pages
from dapo_rl.engines.native.state import SlotState
from dapo_rl.engines.token_sampling import draw_tokens, uniforms
from dapo_rl.models.attention import Attend, attending

Forward = Callable[[Tensor, Tensor, "CachedAttention"], Tensor]
"""The logits of a token for every row, from the tokens, their positions and their attention."""


def forward_of(model: Any) -> Forward:
    return lambda ids_T, positions_T, attend: next_logits(model, ids_T, positions_T, attend, attend.reach)


def next_logits(model: Any, ids_T: Tensor, positions_T: Tensor, attend: Attend, reach: int, keep: Any = 0) -> Tensor:
    """The logits of packed tokens, or of those that `keep` indexes, computed with the attention `attend`."""
    with attending(model, attend, reach):
        output = model(
            input_ids=ids_T[None], position_ids=positions_T[None].long(), use_cache=False, logits_to_keep=keep
        )
    logits: Tensor = output.logits[0]
    return logits


def eager_step(
    forward: Forward, cache: KVCache, pages: Pages, state: SlotState, rows: int, truncates: bool, is_stop_V: Tensor
) -> None:
    positions_B = state.position[:rows].long()
    attend = CachedAttention(cache, pages, torch.arange(rows), positions_B)
    logits_BV = forward(state.last_token[:rows], positions_B, attend)
    uniforms_B = uniforms(state.key[:rows], state.generated[:rows])
    tokens_B, logps_B = draw_tokens(logits_BV, uniforms_B, state.how(slice(0, rows), truncates))
    state.advance(torch.arange(rows), tokens_B, logps_B, is_stop_V, cached=1)


class CachedAttention:
    """Each row's new token attends to its sequence's pages and to itself. BatchRow i is slot i."""

    def __init__(self, cache: KVCache, pages: Pages, slots_B: Tensor, positions_B: Tensor) -> None:
        self._cache = cache
        self.reach = int(positions_B.max()) + 1
        table_BM = pages.table[: len(slots_B)].long()
        self._pages_B = table_BM.gather(1, positions_B[:, None] // pages.page_tokens).squeeze(1)
        self._offsets_B = positions_B % pages.page_tokens
        self._table_BM = None if pages.whole else table_BM[:, : pages.needed(self.reach)]
        beyond_BL = torch.arange(self.reach) > positions_B[:, None]
        self._mask_B11L = torch.zeros(beyond_BL.shape).masked_fill_(beyond_BL, -torch.inf)[:, None, None]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        self._cache.put(layer, self._pages_B, self._offsets_B, k_TKD, v_TKD)
        rows, heads, width = q_THD.shape
        keys, values = (self._in_order(x[layer], rows) for x in (self._cache.keys, self._cache.values))
        # Query heads that share a key-value head become queries of one sequence, so keys need not be repeated.
        q_BKRD = q_THD.reshape(rows, keys.shape[1], -1, width).to(keys.dtype)
        out_BKRD = F.scaled_dot_product_attention(q_BKRD, keys, values, attn_mask=self._mask_B11L, scale=scale)
        return out_BKRD.reshape(rows, heads, -1).to(q_THD.dtype)

    def _in_order(self, x_NKPD: Tensor, rows: int) -> Tensor:
        """Each row's keys or values, `[B, K, L, D]`: in place if a page holds a whole sequence, otherwise copied."""
        if self._table_BM is None:
            return x_NKPD[:rows, :, : self.reach]
        x_BMPKD = x_NKPD.transpose(1, 2)[self._table_BM]
        return x_BMPKD.flatten(1, 2)[:, : self.reach].transpose(1, 2)
