"""LoRA: low-rank adapters on the linear layers, which peft injects into the Hugging Face module.

The module keeps its class and its frozen base weights. Engines and saved models get plain weights under the base
model's names, with the adapters merged in: base + scaling · B · A.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dapo_rl.config import LoraSettings
from dapo_rl.errors import UserError
from dapo_rl.models.forward import TokenStats
from dapo_rl.models.responses import ResponseLogps
from dapo_rl.types import TrainSample

_ADAPTER = "default"


def add_lora(model: Any, settings: LoraSettings, seed: int) -> None:
    """Adds adapters to the model in place; only they are trained. The model's output does not change yet."""
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"model.lora: needs peft ({error}); pip install 'dapo-rl[lora]'") from None
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(lora_config(settings), model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"model.lora.targets: {' '.join(str(error).split())}") from None
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if _is_adapted(embedding):
            raise UserError("model.lora.targets: embeddings and the output layer cannot have adapters; leave them out")
    model.eval()


def lora_config(settings: LoraSettings, base: str | None = None) -> Any:
    from peft import LoraConfig

    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=targets,
    )


def has_lora(model: Any) -> bool:
    return any(_is_adapted(module) for module in model.modules())


def plain_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters with any adapters merged in, one at a time."""
    return _merge(model, model.named_parameters())


def save_plain(model: Any, path: str | os.PathLike[str]) -> None:
    """Saves in Hugging Face format, with any adapters merged in."""
    if has_lora(model):
        model.save_pretrained(path, state_dict=dict(_merge(model, model.state_dict().items())))
    else:
        model.save_pretrained(path)


def save_adapter(model: Any, tokenizer: Any, settings: LoraSettings, base: str, path: str | os.PathLike[str]) -> None:
    """Saves the adapters in peft's format, and the tokenizer; `base` names the model that they belong to."""
    try:
        os.makedirs(path, exist_ok=True)
        _write_adapter(model, settings, base, path)
        tokenizer.save_pretrained(path)
    except Exception as error:  # on a full disk safetensors raises its own class
        raise UserError(f"{path}: the adapter cannot be saved: {error}") from error


def _write_adapter(model: Any, settings: LoraSettings, base: str, path: str | os.PathLike[str]) -> None:
    from safetensors.torch import save_file

    mark = f".{_ADAPTER}.weight"
    weights = {
        f"base_model.model.{name.removesuffix(mark)}.weight": tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if name.endswith(mark)
    }
    save_file(weights, os.path.join(path, "adapter_model.safetensors"), metadata={"format": "pt"})
    config = lora_config(settings, base)
    if settings.targets == "all-linear":  # peft expects names in the file
        config.target_modules = {name.split(".")[-1] for name, module in model.named_modules() if _is_adapted(module)}
    config.inference_mode = True
    config.save_pretrained(path)


class WithoutAdapter(ResponseLogps):
    """Log-probabilities under the base model, with the adapters disabled: a reference that takes no extra memory."""

    @contextmanager
    def compute(self, samples: Sequence[TrainSample]) -> Iterator[TokenStats]:
        layers = [module for module in self._model.modules() if _is_adapted(module)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            with super().compute(samples) as stats:
                yield stats
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _merge(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the base model's names, with adapters merged into them."""
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    for name, tensor in weights:
        layer, found, kind = name.partition(".base_layer.")
        if found and kind == "weight":
            yield f"{layer}.{kind}", tensor.detach() + adapted[layer].get_delta_weight(_ADAPTER).detach()
        elif found:
            yield f"{layer}.{kind}", tensor.detach()
        elif ".lora_" not in name:
            yield name, tensor.detach()
