"""Checks that tensors are finite, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def not_finite(values: Any) -> str | None:
    """The name of the first tensor that contains an infinity or NaN, or None; `values` may be nested."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(values, ""):
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append((name, tensor))
    for device, entries in by_device.items():
        # The extremes of each tensor, because a sum of finite numbers can overflow. One synchronisation per GPU.
        if device.type == "cpu":  # several times faster than the norm
            largest = [torch.stack(torch.aminmax(tensor)).abs().amax() for _, tensor in entries]
        else:
            largest = list(torch._foreach_norm([tensor for _, tensor in entries], float("inf")))
        finite = torch.stack([value.double() for value in largest]).isfinite().tolist()
        for (name, _), is_finite in zip(entries, finite, strict=True):
            if not is_finite:
                return name
    return None


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # a moment of an 8-bit optimizer consists of several tensors
            parts, _ = value.__tensor_flatten__()
            for part in parts:
                yield from _tensors(getattr(value, part), f"{name}.{part}")
        else:
            yield name, value.detach()
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
