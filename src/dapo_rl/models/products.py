"""Who multiplies matrices on a CPU: which library, and how many threads."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quick_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """The faster library for a model's products.

    On 64-bit Arm torch hands float32 products to oneDNN. For small matrices that takes up to 17 times as long as the
    BLAS does (64 × 128 × 128 on two cores: 0.74 ms and 0.04 ms), and for large ones as long.
    """
    on_arm = device.type == "cpu" and platform.machine() in ("aarch64", "arm64")
    if not (on_arm and dtype == torch.float32):
        yield
        return
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


ALONE = 2**23
"""Multiplications that one thread does alone: a quarter of a millisecond."""


@contextmanager
def enough_threads(multiplications: int) -> Iterator[None]:
    """One thread for small products, all for large ones.

    Two threads wait for each other after every product. Where another program holds a core, that is a turn of the
    scheduler each time: a step of 176 rows of the embedded model then takes 88 to 125 ms on two threads and 26 on one,
    and on an idle machine 19 and 26.
    """
    threads = torch.get_num_threads()
    if multiplications > ALONE or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def largest_product(model: Any) -> int:
    """Multiplications for one token in the model's largest product, the vocabulary's left out."""
    vocabulary = {id(e.weight) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e is not None}
    return max((p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in vocabulary), default=0)
