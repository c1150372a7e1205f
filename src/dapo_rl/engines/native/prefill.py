"""Computes the keys and values of tokens that are known: prompts, and the contexts of partial samples.

One pass of the model computes the tokens of many sequences, packed into one row. A long sequence is computed in several
passes: its tokens then attend to those that are in the cache already.

Shapes: T tokens of a pass, X tokens read from the cache, E tokens written to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dapo_rl.engines.native.kv_cache import KVCache
from dapo_rl.engines.native.model_runner import next_logits
from dapo_rl.engines.native.page_table import Pages, Places
from dapo_rl.engines.native.slots import BatchRow
from dapo_rl.engines.protocol import Request
from dapo_rl.models.device import to_device
from dapo_rl.models.packing import Packed
from dapo_rl.types import IntArray


@dataclass(slots=True)
class Prefill:
    """A sequence to compute, for one or more rows that begin with it."""

    request: Request
    rows: list[BatchRow]
    tokens: IntArray
    """The whole sequence."""
    waits: bool = False
    """Whether more samples of the request wait for slots; they will need what is not in shared pages."""
    done: int = 0
    """Tokens that are in the cache."""
    sibling: Prefill | None = None
    """A sequence earlier in the same pass that has the same prompt, which is `done` for this one too."""
    donor: int | None = None
    """Likewise, a slot with the same prompt in the cache."""
    continues: bool = False
    """Likewise, whether its slot has a kept sequence that begins it."""
    shared: list[int] = field(default_factory=list)
    """If samples wait, the pages that they will share."""
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    """If samples wait, the keys beyond the shared pages, by layer."""
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


def compute(
    model: Any, cache: KVCache, pages: Pages, work: Sequence[Prefill], most: int, device: torch.device
) -> Tensor:
    """Computes up to `most` tokens, in order; returns the logits after the last token of each sequence."""
    built = _Pass(pages, work, most)
    packed = Packed(built.input_ids, built.positions, built.sequences, built.own, device, cached=built.cached)
    read_pages, read_offsets = _concatenated(built.read, device)
    sources_E = to_device(np.concatenate(built.sources), device)
    pages_E, offsets_E = _concatenated(built.written, device)
    kept = [(prefill, to_device(indices, device)) for prefill, indices in built.kept]

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        if built.cached:
            k_XKD, v_XKD = cache.read(layer, read_pages, read_offsets)
            k_TKD, v_TKD = torch.cat([k_TKD, k_XKD.to(k_TKD.dtype)]), torch.cat([v_TKD, v_XKD.to(v_TKD.dtype)])
        cache.put(layer, pages_E, offsets_E, k_TKD[sources_E], v_TKD[sources_E])
        for prefill, indices in kept:
            prefill.keys.setdefault(layer, []).append(k_TKD[indices])
            prefill.values.setdefault(layer, []).append(v_TKD[indices])
        return packed(layer, q_THD, k_TKD, v_TKD, scale)

    ends = to_device(np.array(built.ends), device)
    logits = next_logits(model, packed.input_ids_T, packed.position_ids_T, attend, packed.longest, ends)
    for prefill, count in zip(work, built.own, strict=True):
        prefill.done += count
        prefill.sibling = prefill.donor = None
    return logits


def place(cache: KVCache, pages: Pages, prefill: Prefill, rows: Sequence[BatchRow]) -> None:
    """Copies what is not in shared pages of a computed prompt to the slots of more of its samples."""
    length = len(prefill.tokens)
    written = [pages.places(row.slot, _first_own(pages, prefill), length) for row in rows]
    pages_E, offsets_E = _concatenated(written, pages.table.device)
    for layer in prefill.keys:
        k, v = (torch.cat(tensors[layer]).repeat(len(rows), 1, 1) for tensors in (prefill.keys, prefill.values))
        cache.put(layer, pages_E, offsets_E, k, v)


class _Pass:
    """The tokens of a pass: what is computed, what is read from the cache, and where each token is written."""

    def __init__(self, pages: Pages, work: Sequence[Prefill], most: int) -> None:
        self.input_ids: list[IntArray] = []
        self.positions: list[npt.NDArray[np.int64]] = []
        self.sequences: list[npt.NDArray[np.int64]] = []
        """Indices of the tokens of each sequence: first of the T computed, then of the X read."""
        self.own: list[int] = []
        self.ends: list[int] = []
        self.read: list[Places] = []
        self.sources: list[npt.NDArray[np.int64]] = []
        self.written: list[Places] = []
        self.kept: list[tuple[Prefill, npt.NDArray[np.int64]]] = []
        self.cached = 0
        counts: list[int] = []
        for prefill in work:
            counts.append(min(prefill.left, most - sum(counts)))
        in_pass: dict[int, npt.NDArray[np.int64]] = {}
        start, total = 0, sum(counts)
        for prefill, count in zip(work, counts, strict=True):
            stop = prefill.done + count
            indices = np.concatenate([self._before(pages, prefill, in_pass, total), np.arange(start, start + count)])
            in_pass[id(prefill)] = indices
            self.input_ids.append(prefill.tokens[prefill.done : stop])
            self.positions.append(np.arange(prefill.done, stop))
            self.sequences.append(indices)
            self.own.append(count)
            start += count
            self.ends.append(start - 1)
            own = _first_own(pages, prefill)
            for n, row in enumerate(prefill.rows):
                borrows = prefill.sibling is not None or prefill.donor is not None
                first = own if borrows else max(prefill.done, own if n else 0)
                self.sources.append(indices[first:stop])
                self.written.append(pages.places(row.slot, first, stop))
            if prefill.waits:
                self.kept.append((prefill, indices[max(prefill.done, own) : stop]))

    def _before(
        self, pages: Pages, prefill: Prefill, in_pass: dict[int, npt.NDArray[np.int64]], total: int
    ) -> npt.NDArray[np.int64]:
        """The indices of the tokens that come before those to compute."""
        if prefill.sibling is not None:
            return in_pass[id(prefill.sibling)][: prefill.done]
        if prefill.done:
            slot = prefill.rows[0].slot if prefill.donor is None else prefill.donor
            self.read.append(pages.places(slot, 0, prefill.done))
            self.cached += prefill.done
        return np.arange(total + self.cached - prefill.done, total + self.cached)


def _first_own(pages: Pages, prefill: Prefill) -> int:
    """The first position that is not in a page that the samples of the prompt share."""
    return pages.full(len(prefill.request.prompt_ids)) * pages.page_tokens


def _concatenated(places: Sequence[Places], device: torch.device) -> tuple[Tensor, Tensor]:
    if not places:
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device)
    pages, offsets = (np.concatenate(parts) for parts in zip(*places, strict=True))
    return to_device(pages, device), to_device(offsets, device)
