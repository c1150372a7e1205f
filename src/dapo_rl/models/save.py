"""Saves a model in Hugging Face format: for the user, and exactly and in the background for checkpoints."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dapo_rl.base.format import gib
from dapo_rl.base.hashing import DeferredWrite, Digests, IsCancelled, hashing
from dapo_rl.base.host_memory import host_memory
from dapo_rl.errors import UserError
from dapo_rl.models.lora import has_lora, plain_weights

COPY_SHARE = 0.75
"""The share of the host's memory that a run and its copies may take."""


def why_no_copy(nbytes: int, taken: int = 0) -> str | None:
    """Why there is no copy of so many bytes in host memory, of which the run itself takes `taken`; None if it fits."""
    has = host_memory()
    if nbytes + taken <= COPY_SHARE * has:
        return None
    return f"a copy in host memory would take {gib(nbytes)} of {gib(has)}"


class HostCopy:
    """Copies nested tensors. The next copy reuses the memory, so that it is allocated once in a run.

    Tensors that share memory, such as tied weights, share it in the copy too.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, values: Any) -> Any:
        """Copies `values`; the result is valid until the next `take`."""
        self._shared.clear()
        copied = self._copy(values, "")
        self._synchronize()
        return copied

    def take_more(self, items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies tensors that are computed one at a time, each freed before the next. Those that are part of the last
        `take` are not copied again."""
        copied: dict[str, Tensor] = {}
        for name, tensor in items:
            known = self._shared.get(_identity(tensor))
            copied[name] = self._copy_tensor(tensor, f"more.{name}") if known is None else known
            del tensor
        self._synchronize()
        return copied

    def _copy(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._copy_shared(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._copy(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._copy(inner, f"{name}.{key}") for key, inner in enumerate(value)])
        return value

    def _copy_shared(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "__tensor_flatten__"):  # a moment of an 8-bit optimizer consists of several tensors
            names, context = tensor.__tensor_flatten__()
            parts = {part: self._copy_shared(getattr(tensor, part), f"{name}.{part}") for part in names}
            whole: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
            return whole
        key = _identity(tensor)
        if key not in self._shared:
            self._shared[key] = self._copy_tensor(tensor, name)
        return self._shared[key]

    def _copy_tensor(self, tensor: Tensor, name: str) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = torch.empty_like(tensor, device="cpu")
            if tensor.is_cuda:
                self._pin(buffer)
        # On the stream of the computation: memory that `take_more` frees is not reused before it is copied.
        buffer.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return buffer

    def _pin(self, buffer: Tensor) -> None:
        """Page-locks the buffer. `pin_memory=True` would round its size up to a power of two."""
        runtime = torch.cuda.cudart()
        if buffer.nbytes and int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
            # The callback refers to the buffer, which is therefore freed after it is unlocked.
            weakref.finalize(self, lambda: runtime.cudaHostUnregister(buffer.data_ptr()))

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def save_model(
    model: Any,
    tokenizer: Any,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the model, with any adapters merged in, and its tokenizer in Hugging Face format; `dtype` is that of the
    saved weights, by default the model's. `weights`, if given, are saved instead of the model's own."""
    if Path(path).is_file():  # transformers would log this and save nothing
        raise UserError(f"{path}: a model is saved as a directory, but this is a file")
    try:
        own = model.state_dict() if weights is None else weights
        merged = plain_weights(model, own.items()) if weights is None else own.items()
        _write_plain(model, merged, path, dtype, own)
        tokenizer.save_pretrained(path)
    except Exception as error:  # on a full disk safetensors raises its own class
        raise UserError(f"{path}: the model cannot be saved: {error}") from error


def _write_plain(
    model: Any,
    weights: Iterable[tuple[str, Tensor]],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    lasting: Mapping[str, Tensor],
) -> None:
    """Saves these weights as those of the model, without adapters, converted to `dtype`."""
    if getattr(model, "_hf_peft_config_loaded", False):  # of its own adapters, transformers would save nothing else
        model = copy.copy(model)
        model._hf_peft_config_loaded = False
    model.save_pretrained(path, state_dict=_converted(weights, dtype, lasting))
    if dtype not in (None, model.dtype):  # it has written that of the model in memory
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(path)


def _converted(
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

    def save(self, directory: Path) -> DeferredWrite:
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
            _write_plain(self._model, plain.items(), directory / MODEL, self._dtype, plain)
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
        for name, tensor in plain_weights(self._model, state.items()):
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


def done_now(write: DeferredWrite) -> DeferredWrite:
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
