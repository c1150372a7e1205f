"""Stores a model's weights exactly, in Hugging Face format as far as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dapo_rl.base.hashing import Digests, IsCancelled, Rest, hashing
from dapo_rl.models.host_copy import HostCopy
from dapo_rl.models.lora import has_lora, plain_state
from dapo_rl.models.saving import converted, write_plain

MODEL = "model"
WEIGHTS = "weights.pt"
"""A second copy of the weights, written if the Hugging Face format changes a name or a value."""


class StoredModel:
    """Writes `model/`, in `dtype` and with the tokenizer if there is one, and `weights.pt` if `model/` does not store
    the weights exactly."""

    def __init__(self, model: Any, tokenizer: Any, dtype: torch.dtype | None = None, *, copied: bool = True) -> None:
        """If not `copied`, `save` writes the weights itself, one at a time, instead of copying them."""
        self._model, self._tokenizer, self._dtype = model, tokenizer, dtype
        self._copies = HostCopy() if copied else None
        self._exact: bool | None = None
        """Whether `model/` stores the weights exactly; found out when it is first written."""

    def save(self, directory: Path) -> Rest:
        """Copies the weights to host memory, where they stay until the next call. The result writes them."""
        state = self._model.state_dict()
        weights: dict[str, Tensor] = state if self._copies is None else self._copies.take(state)
        plain = weights
        if has_lora(self._model):
            merged = self._merged(state)
            if self._copies is None:
                plain = {name: tensor.cpu() for name, tensor in merged}
            else:
                plain = self._copies.take_more(merged)
        files = self._tokenizer_files

        def write(is_cancelled: IsCancelled) -> Digests:
            saved = converted(plain.items(), self._dtype, plain)
            write_plain(self._model, saved, directory / MODEL, self._dtype)
            for name, content in files.items():
                path = directory / MODEL / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if self._exact is None:
                self._exact = _same_bits(weights, dict(_in_safetensors(directory / MODEL)))
            return {} if self._exact else {WEIGHTS: save_hashed(weights, directory / WEIGHTS, is_cancelled)}

        return write if self._copies is not None else done_now(write)

    def _merged(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What `model/` stores: merged weights in its dtype, and the others as the copy already has them."""
        copied = {tensor.data_ptr() for tensor in state.values()}
        for name, tensor in plain_state(self._model):
            yield name, tensor if self._dtype is None or tensor.data_ptr() in copied else tensor.to(self._dtype)

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer does not change in a run, and cannot be saved while another thread uses it."""
        if self._tokenizer is None:
            return {}
        with TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def done_now(write: Rest) -> Rest:
    """Writes at once; what is left to do later is nothing."""
    digests = write(lambda: False)
    return lambda is_cancelled: digests


def save_hashed(state: Any, path: Path, is_cancelled: IsCancelled) -> str:
    """Writes a file as `torch.save` does, and returns its SHA-256."""
    with hashing(path, is_cancelled) as file:
        torch.save(state, file)  # type: ignore[arg-type]
    return file.hexdigest()


def stored_weights(directory: Path) -> dict[str, Tensor]:
    """Loads the weights that `StoredModel` wrote, on the CPU."""
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
