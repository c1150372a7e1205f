"""Saves a model in Hugging Face format, in the dtype that the settings name."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dapo_rl.models.lora import plain_state


def save_plain(model: Any, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Saves the model with any adapters merged in; `dtype` is that of the weights, by default as it is."""
    write_plain(model, converted(plain_state(model), dtype, model.state_dict()), path, dtype)


def write_plain(
    model: Any, weights: Mapping[str, Tensor], path: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> None:
    """Saves these weights as those of the model, without adapters; `dtype` is what they are converted to."""
    model.save_pretrained(path, state_dict=dict(weights))
    if dtype not in (None, model.dtype):  # it has written that of the model in memory
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(path)


def converted(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, lasting: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Floating-point weights in `dtype`, on the CPU where this changes them; None: as they are.

    Weights that share memory share it afterwards. `lasting` are the tensors that outlive the iteration: the memory of
    another may be used again by the next.
    """
    addresses = {tensor.data_ptr() for tensor in lasting.values()}
    shared: dict[int, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in weights:
        if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
            result[name] = tensor
            continue
        address = tensor.data_ptr()
        narrow = shared[address] if address in shared else tensor.to(dtype).cpu()
        if address in addresses:
            shared[address] = narrow
        result[name] = narrow
    return result
