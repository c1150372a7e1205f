"""Stores a model's weights exactly, in Hugging Face format as far as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dapo_rl.models.lora import save_plain

MODEL = "model"
WEIGHTS = "weights.pt"
"""A second copy of the weights, written if the Hugging Face format changes a name or a value."""


def store(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes `model/`, with the tokenizer if there is one, and `weights.pt` if `model/` does not store the weights
    exactly."""
    save_plain(model, directory / MODEL)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory / MODEL)
    weights = model.state_dict()
    if not _same_bits(weights, dict(_in_safetensors(directory / MODEL))):
        torch.save(weights, directory / WEIGHTS)


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Loads the weights that `store` wrote, on the CPU."""
    if (directory / WEIGHTS).exists():
        weights: dict[str, Tensor] = torch.load(directory / WEIGHTS, map_location="cpu", weights_only=True)
        return weights
    return dict(_in_safetensors(directory / MODEL))


def weight_difference(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> str | None:
    """How stored weights differ from those of a model, or None. Tied weights need only one name."""
    covered = {own[name].data_ptr() for name in stored if name in own}
    for name, tensor in stored.items():
        if name not in own:
            return f"it has {name}"
        if tensor.shape != own[name].shape:
            return f"{name} has the shape {list(tensor.shape)} instead of {list(own[name].shape)}"
        if tensor.dtype != own[name].dtype:
            return f"{name} is {tensor.dtype} instead of {own[name].dtype}".replace("torch.", "")
    return next((f"it has no {name}" for name, tensor in own.items() if tensor.data_ptr() not in covered), None)


def _same_bits(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    if weight_difference(own, stored):
        return False
    return all(torch.equal(tensor, own[name].cpu()) for name, tensor in stored.items())


def _in_safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
