"""Decode steps: one token for every row. On a CPU rows are the first n slots, and each step runs at once.

On a GPU, one CUDA graph per batch size runs the model, draws a token and updates the slot state. A graph is captured
when its batch size first occurs. Between looks at the rows the host only replays graphs: generated tokens and done
flags stay on the device. The host works on the result of a look while the next steps run. Sequence lengths need no
separate graphs, because the attention kernel reads each row's length and pages from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dapo_rl.engines.native.kv_cache import KVCache
from dapo_rl.engines.native.page_table import Pages
from dapo_rl.engines.native.slots import BatchRow, SlotState
from dapo_rl.engines.token_sampling import draw_tokens, uniforms
from dapo_rl.models.attention import Attend, attending
from dapo_rl.models.device import to_device


def next_logits(model: Any, ids_T: Tensor, positions_T: Tensor, attend: Attend, reach: int, keep: Any = 0) -> Tensor:
    """The logits of packed tokens, or of those that `keep` indexes, computed with the attention `attend`."""
    with attending(model, attend, reach):
        output = model(
            input_ids=ids_T[None], position_ids=positions_T[None].long(), use_cache=False, logits_to_keep=keep
        )
    logits: Tensor = output.logits[0]
    return logits


def eager_step(
    model: Any, cache: KVCache, pages: Pages, state: SlotState, rows: int, truncates: bool, is_stop_V: Tensor
) -> None:
    positions_B = state.position[:rows].long()
    attend = CachedAttention(cache, pages, torch.arange(rows), positions_B)
    logits_BV = next_logits(model, state.last_token[:rows], positions_B, attend, attend.reach)
    uniforms_B = uniforms(state.key[:rows], state.generated[:rows])
    tokens_B, logps_B, kept_BK = draw_tokens(logits_BV, uniforms_B, state.how(slice(0, rows), truncates))
    slots_B = torch.arange(rows)
    state.record_kept(slots_B, kept_BK)
    state.advance(slots_B, tokens_B, logps_B, is_stop_V, cached=1)


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


def batch_bucket(rows: int) -> int:
    """The batch size of the graph for this many rows. Few rows take as long as any number up to 128; beyond that, the
    time of a step grows with its rows, in steps of a matrix product's tile."""
    if rows <= 128:
        power = 1 << max(rows - 1, 0).bit_length()
        return power * 3 // 4 if power >= 32 and rows <= power * 3 // 4 else power
    tile = 64 if rows <= 512 else 128
    return -(-rows // tile) * tile


class KernelAttention:
    """Each row's new token attends to its sequence's pages and to itself."""

    def __init__(self, cache: KVCache, pages: Pages, slots_B: Tensor, positions_B: Tensor) -> None:
        from dapo_rl.engines.native import kernels

        self._kernels, self._cache, self._table = kernels, cache, pages.table
        self._slots_B, self._positions_B = slots_B, positions_B
        multiprocessors = torch.cuda.get_device_properties(slots_B.device).multi_processor_count
        heads = next(iter(cache.keys.values())).shape[1]
        self._splits = kernels.splits_for(len(slots_B), heads, multiprocessors)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return self._kernels.decode_attention(
            q_THD, k_TKD, v_TKD, keys, values, self._table, self._slots_B, self._positions_B, scale, self._splits
        )


@dataclass(frozen=True, slots=True)
class Look:
    """How far some rows have come, copied to the host while the device goes on."""

    rows: Sequence[BatchRow]
    flags: Tensor
    """`[2, B]`: whether each row is done, and its number of tokens."""
    copied: torch.cuda.Event

    def wait(self) -> tuple[list[int], list[int]]:
        self.copied.synchronize()
        done, generated = self.flags.tolist()
        return done, generated


class GraphedSteps:
    """Decode steps over one cache and one state; graphs hold their addresses, so a new cache needs new graphs."""

    def __init__(
        self, model: Any, cache: KVCache, pages: Pages, state: SlotState, is_stop_V: Tensor, reach: int
    ) -> None:
        """The last slot of the state is for padding rows; `reach` is the longest context."""
        self._reach = reach
        self._model, self._cache, self._pages, self._state, self._is_stop_V = model, cache, pages, state, is_stop_V
        self._spare_slot = len(state.done) - 1
        self._slots = torch.full((batch_bucket(len(state.done)),), self._spare_slot, device=state.done.device)
        self._rows: list[int] = []
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: cuBLAS keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream()
        self._reading = torch.cuda.Stream()

    def run(self, rows: Sequence[BatchRow], steps: int, truncates: bool) -> Look:
        """Starts `steps` decode steps for the rows; a finished row does not change."""
        slots = [row.slot for row in rows]
        bucket = batch_bucket(len(slots))
        graph = self._graphs.get((bucket, truncates)) or self._capture(bucket, truncates)
        padded = [*slots, *[self._spare_slot] * (bucket - len(slots))]
        if padded != self._rows:
            self._slots[:bucket] = to_device(np.array(padded), self._slots.device)
            self._rows = padded
        for _ in range(steps):
            graph.replay()
        slots_B = self._slots[: len(rows)]
        flags = torch.stack([self._state.done[slots_B].int(), self._state.generated[slots_B]])
        on_host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Look(list(rows), on_host, copied)

    def advance(self, slots: Tensor, tokens_B: Tensor, logps_B: Tensor, is_stop_V: Tensor, cached: int) -> None:
        """`SlotState.advance` in one kernel, which the host does not wait for."""
        from dapo_rl.engines.native import kernels

        kernels.advance(tokens_B, logps_B, slots, self._state, is_stop_V, cached=cached)

    @contextmanager
    def reading(self, look: Look) -> Iterator[None]:
        """Inside, what is read from the device does not wait for steps after the look. Only what no longer changes may
        be read: the tokens of finished rows, and those that a row had at the look."""
        self._reading.wait_event(look.copied)
        with torch.cuda.stream(self._reading):
            yield

    def _capture(self, bucket: int, truncates: bool) -> torch.cuda.CUDAGraph:
        # Warm-up executes the step, so it runs on the spare slot, which is always done.
        self._slots.fill_(self._spare_slot)
        self._rows = []
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                self._step(bucket, truncates)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._step(bucket, truncates)
        self._graphs[bucket, truncates] = graph
        return graph

    def _step(self, bucket: int, truncates: bool) -> None:
        from dapo_rl.engines.native import kernels

        state, slots_B = self._state, self._slots[:bucket]
        positions_B = state.position[slots_B]
        attend = KernelAttention(self._cache, self._pages, slots_B, positions_B)
        logits_BV = next_logits(self._model, state.last_token[slots_B], positions_B, attend, self._reach)
        if truncates:
            how = state.how(slots_B, truncates)
            uniforms_B = uniforms(state.key[slots_B], state.generated[slots_B])
            tokens_B, logps_B, kept_BK = draw_tokens(logits_BV, uniforms_B, how)
            state.record_kept(slots_B, kept_BK)
            kernels.advance(tokens_B, logps_B, slots_B, state, self._is_stop_V, cached=1)
        else:
            kernels.draw_and_advance(logits_BV, slots_B, state, self._is_stop_V, cached=1)
