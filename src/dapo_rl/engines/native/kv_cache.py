"""The keys and values of all sequences, in pages of one pool.

Shapes: N pages, K key-value heads, P tokens of a page, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dapo_rl.models.reserved_memory import ReservedMemory


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
            tensors = {layer: [_zeros(shape, self.dtype, device) for shape in pair] for layer, pair in shapes.items()}
        self.keys = {layer: keys for layer, (keys, _) in tensors.items()}
        self.values = {layer: values for layer, (_, values) in tensors.items()}

    def put(self, layer: int, pages_E: Tensor, offsets_E: Tensor, keys_EKD: Tensor, values_EKD: Tensor) -> None:
        """Writes the keys and values of E tokens, each to its page and its place there."""
        self.keys[layer][pages_E, :, offsets_E] = keys_EKD.to(self.dtype)
        self.values[layer][pages_E, :, offsets_E] = values_EKD.to(self.dtype)

    def read(self, layer: int, pages_E: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of E tokens, `[E, K, D]`."""
        return self.keys[layer][pages_E, :, offsets_E], self.values[layer][pages_E, :, offsets_E]

    def swap(self, one: int, other: int) -> None:
        """Exchanges the contents of two pages."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[[one, other]] = tensor[[other, one]]

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Places beyond a sequence are multiplied before they are masked, so they must be finite.

    On a CPU calloc provides the zeros: memory that is never written is not taken, so unused capacity is free.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
