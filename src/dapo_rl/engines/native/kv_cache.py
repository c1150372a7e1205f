"""The keys and values of all sequences, in pages of one pool, and how many pages and sequences fit into memory.

Shapes: N pages, K key-value heads, P tokens of a page, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo_rl.base.host_memory import host_memory
from dapo_rl.errors import UserError
from dapo_rl.models.reserved_memory import ReservedMemory

PAGE_TOKENS = 64
"""Tokens of a page: as many as an attention kernel reads at a time."""
KEPT_ID_BYTES = 4
"""Of the id of a token that truncation kept."""
ENOUGH_ROWS = 64
"""On a CPU, more sequences at a time than this are hardly faster."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    page_tokens: int
    pages: int
    slots: int
    """Sequences at a time."""
    whole: bool = False
    """Whether a page holds a whole sequence; then page i belongs to slot i."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    bytes: int
    token_bytes: int
    """Bytes per token, over all layers."""
    max_batch: int
    device: torch.device
    kept_bytes: int = 0
    """Bytes for each token that a slot has room for, of the ids that truncation kept."""

    def capacity(self, tokens: int) -> int:
        """The tokens of the pages that hold this many."""
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS

    def slots(self, capacity: int) -> int:
        """The number of sequences that fit if all are of this length; a GPU needs one page and one slot for padding
        rows."""
        return min(self.max_batch, max(self.bytes - self._spare(capacity), 0) // (capacity * self._whole_bytes))

    def sequences_bytes(self, count: int, capacity: int) -> int:
        """The bytes of so many sequences of this length."""
        return count * capacity * self._whole_bytes + self._spare(capacity)

    @property
    def _whole_bytes(self) -> int:
        return self.token_bytes + self.kept_bytes

    def _spare(self, capacity: int) -> int:
        return PAGE_TOKENS * self.token_bytes + capacity * self.kept_bytes if self.device.type == "cuda" else 0

    def layout(self, longest: int, page_tokens: int | None = None) -> CacheLayout:
        """How to divide the memory for contexts of at most `longest` tokens.

        On a CPU a page holds a whole sequence if enough of them fit: torch's attention reads contiguous memory.
        """
        if not longest:
            return CacheLayout(PAGE_TOKENS, 0, 0, whole=True)
        capacity = self.capacity(longest)
        if page_tokens is None and self.device.type == "cpu":
            slots = self.slots(capacity)
            if capacity <= PAGE_TOKENS or slots >= min(self.max_batch, ENOUGH_ROWS):
                return CacheLayout(capacity, slots, slots, whole=True)
        tokens, on_cpu = page_tokens or PAGE_TOKENS, self.device.type == "cpu"
        rows = self._paged_rows(capacity)
        most = rows * -(-capacity // tokens)
        of_pages = self.bytes - (rows + (not on_cpu)) * capacity * self.kept_bytes
        pages = min(of_pages // (tokens * self.token_bytes) + on_cpu, most + 1)
        return CacheLayout(tokens, pages, min(rows, pages - 1))

    def _paged_rows(self, capacity: int) -> int:
        """The most sequences in pages. Kept ids, for which each has room up to the longest length, take half of the
        memory at most, unless no more sequences fit than that."""
        if not self.kept_bytes:
            return self.max_batch
        half = self.bytes // 2
        rows = half // (capacity * self.kept_bytes) - 1 if half >= (capacity + PAGE_TOKENS) * self.token_bytes else 0
        return min(self.max_batch, max(rows, self.slots(capacity)))

    def check(self, tokens: int) -> None:
        """Raises if not even one sequence of this many tokens fits."""
        needs = self.capacity(tokens)
        if tokens and self.slots(needs) < 1:
            raise UserError(
                f"sampling.kv_memory_gib: one sequence of {needs} tokens takes "
                f"{self.sequences_bytes(1, needs) / 2**30:.2g} GiB, but only {self.bytes / 2**30:.2g} are allowed; "
                "raise it, or lower sampling.max_new_tokens"
            )


def memory_share(device: torch.device) -> int:
    """A third of a GPU's free memory, or a quarter of the host's total: a run must not depend on what else is
    running."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 3
    return host_memory() // 4


@dataclass(frozen=True, slots=True)
class LayerShape:
    heads: int
    key_width: int
    value_width: int


class KVCache:
    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        reserved: bool = False,
    ) -> None:
        """If `reserved`, on a GPU, the memory can be given up and taken again."""
        self.dtype = kept_in(dtype, device)
        shapes = {
            layer: [(pages, shape.heads, page_tokens, width) for width in (shape.key_width, shape.value_width)]
            for layer, shape in layers.items()
        }
        self.memory: ReservedMemory | None = None
        if reserved and shapes and pages:
            sizes = [math.prod(shape) * self.dtype.itemsize for pair in shapes.values() for shape in pair]
            self.memory = ReservedMemory(sum(sizes), device)
            pieces = iter(self.memory.tensor(torch.uint8, (sum(sizes),)).split(sizes))
            tensors = {
                layer: [next(pieces).view(self.dtype).view(shape).zero_() for shape in pair]
                for layer, pair in shapes.items()
            }
        else:
            tensors = {layer: [zeros(shape, self.dtype, device) for shape in pair] for layer, pair in shapes.items()}
        self.keys = {layer: keys for layer, (keys, _) in tensors.items()}
        self.values = {layer: values for layer, (_, values) in tensors.items()}

    def put(self, layer: int, pages_E: Tensor, offsets_E: Tensor, keys_EKD: Tensor, values_EKD: Tensor) -> None:
        """Writes the keys and values of E tokens, each to its page and its place there."""
        self.keys[layer][pages_E, :, offsets_E] = keys_EKD.to(self.dtype)
        self.values[layer][pages_E, :, offsets_E] = values_EKD.to(self.dtype)

    def read(self, layer: int, pages_E: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of E tokens, `[E, K, D]`."""
        return self.keys[layer][pages_E, :, offsets_E], self.values[layer][pages_E, :, offsets_E]

    def swap(self, one: int, other: int, length: int | None = None) -> None:
        """Exchanges the contents of two pages, or their first tokens."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[[one, other], :, :length] = tensor[[other, one], :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first tokens of a page to another page."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[target, :, :length] = tensor[source, :, :length]


def kept_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the cache for a model in `dtype`.

    On a CPU attention runs in float32: in bfloat16 torch reorders all keys and values at every call, which takes
    several times as long as the attention itself.
    """
    return torch.float32 if device.type == "cpu" else dtype


def bytes_per_token(layers: Mapping[int, LayerShape], dtype: torch.dtype, device: torch.device) -> int:
    numbers = sum(shape.heads * (shape.key_width + shape.value_width) for shape in layers.values())
    return numbers * kept_in(dtype, device).itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Places beyond a sequence are multiplied before they are masked, so they must be finite.

    On a CPU calloc provides the zeros: memory that is never written is not taken, so unused capacity is free.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
