"""LoRA: low-rank adapters on the linear layers, which peft injects into the Hugging Face module.

The module keeps its class and its frozen base weights. Engines and saved models get plain weights under the base
model's names, with the adapters merged in: base + scaling · B · A. With DoRA, each row of this sum is rescaled to the
length that the adapter has learned for it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dapo_rl.base.quote import shown
from dapo_rl.config import LoraSettings
from dapo_rl.config.peers import LIBRARIES
from dapo_rl.errors import UserError
from dapo_rl.models.response_logps import ResponsePass, TokenStats
from dapo_rl.types import Trajectory

_ADAPTER = "default"
_MAGNITUDE = "lora_magnitude_vector"
"""The lengths of rows that DoRA trains."""


def add_lora(model: Any, settings: LoraSettings, seed: int) -> None:
    """Adds adapters to the model in place; only they are trained. The model's output does not change yet."""
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"model.lora: needs peft ({error}); pip install 'dapo-rl[lora]'") from None
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = lora_config(settings)
            if settings.targets == "all-linear":
                config.exclude_modules = _routers(model) or None
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise UserError(f"model.lora.targets: {' '.join(str(error).split())}") from None
    _check_embeddings(model, "model.lora.targets")
    model.eval()


def _routers(model: Any) -> list[str]:
    """Linear layers that return more than a product, such as a choice of experts; adapters cannot be added to them."""
    modules = model.named_modules()
    return [name for name, m in modules if isinstance(m, nn.Linear) and type(m).forward is not nn.Linear.forward]


def _check_embeddings(model: Any, key: str) -> None:
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if _is_adapted(embedding):
            raise UserError(f"{key}: embeddings and the output layer cannot have adapters; leave them out")


def lora_config(settings: LoraSettings, base: str | None = None) -> Any:
    from peft import LoraConfig

    values = {theirs: getattr(settings, ours) for theirs, ours in _FIELDS.items()}
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    return LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, **{**values, "target_modules": targets})


def lora_settings(peft_config: Any, model: Any) -> LoraSettings:
    """peft's `LoraConfig` as settings. Raises UserError for a field that has no counterpart."""
    kind = _name(getattr(peft_config, "peft_type", None))
    if kind != "LORA":
        raise UserError(f"peft_config: {type(peft_config).__name__} ({kind}): adapters are LoRA; give a LoraConfig")
    if _name(peft_config.task_type) not in ("None", "CAUSAL_LM"):
        raise UserError(f"peft_config: task_type={_name(peft_config.task_type)}: models are causal language models")
    default = type(peft_config)()
    for field in dataclasses.fields(peft_config):
        value = getattr(peft_config, field.name)
        if field.name not in (*_FIELDS, *_WITHOUT_EFFECT) and value != getattr(default, field.name):
            raise UserError(
                f"peft_config: {field.name}={shown(value)}: {_why_not(field.name)}; leave it out to train without it"
            )
    targets = peft_config.target_modules
    if targets is None:
        targets = _usual_targets(model)
    values = {ours: getattr(peft_config, theirs) for theirs, ours in _FIELDS.items()}
    try:
        return LoraSettings(**{**values, "targets": targets if isinstance(targets, str) else tuple(sorted(targets))})
    except ValidationError as error:
        first = error.errors()[0]
        theirs = next(name for name, ours in _FIELDS.items() if ours == first["loc"][0])
        raise UserError(f"peft_config: {theirs}={shown(first['input'])}: {first['msg']}") from None


_FIELDS = {
    **{"r": "rank", "lora_alpha": "alpha", "target_modules": "targets", "lora_dropout": "dropout"},
    **{"use_rslora": "use_rslora", "use_dora": "use_dora"},
}
"""The fields of peft's `LoraConfig` that are settings, and the names of the settings."""
_WITHOUT_EFFECT = (
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config"),
)


def _why_not(name: str) -> str:
    """Why a field of `LoraConfig` has no counterpart."""
    table = LIBRARIES["trl"].settings
    entry = table.get(name) or table.get(f"lora_{name}")
    return (entry.note if entry else "") or "adapters are LoRA on linear layers, from their usual start"


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))


def _usual_targets(model: Any) -> Any:
    """The layers that peft adapts if none are named."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    kind = model.config.model_type
    if kind not in USUAL:
        raise UserError(f"peft_config: target_modules: peft knows none for {kind}; name them, or give 'all-linear'")
    return USUAL[kind]


def base_of(model: Any) -> Any:
    """The model inside a `PeftModel`, with its adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def peft_config_of(model: Any) -> Any | None:
    """The configuration of the adapters that a model already has; None if it has none."""
    if not has_lora(model):
        if getattr(model, "peft_config", None):
            kind = _name(next(iter(model.peft_config.values())).peft_type)
            raise UserError(f"model: its adapters are {kind}, and LoRA is what can be trained; merge them first")
        return None
    configs = dict(model.peft_config)
    if set(configs) != {_ADAPTER}:
        names = ", ".join(configs)
        raise UserError(f"model: its adapters are {names}; one that is named {_ADAPTER} can be trained")
    return configs[_ADAPTER]


def train_adapters(model: Any) -> None:
    _check_embeddings(model, "model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for module in model.modules():
        if _is_adapted(module) and module.merged:
            module.unmerge()


def merged_copy(model: Any) -> Any:
    """A frozen copy with the adapters merged into the weights, and without their layers."""
    copied = copy.deepcopy(model)
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            plain = child
            while _is_adapted(plain):
                if not plain.merged:
                    plain.merge()
                plain = plain.base_layer
            if plain is not child:
                setattr(parent, name, plain)
    return copied.requires_grad_(False)


def is_adapted(model: Any) -> bool:
    """Whether the adapters change the model's output: new ones do not, because B is zero."""
    return any(bool(weight.detach().any()) for name, weight in model.named_parameters() if ".lora_B." in name)


def has_lora(model: Any) -> bool:
    return any(_is_adapted(module) for module in model.modules())


def plain_weights(model: Any, weights: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Weights of the model, by default its parameters, with any adapters merged in, one at a time."""
    own = model.named_parameters() if weights is None else weights
    return ((weight.name, weight.merged()) for weight in without_adapters(model, own))


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the adapters under the names of peft's format."""
    mark = f".{_ADAPTER}.weight"
    saved = {name.removesuffix(mark): t.detach() for name, t in model.state_dict().items() if name.endswith(mark)}
    ends = {name: "" if name.endswith(_MAGNITUDE) else ".weight" for name in saved}
    return {f"base_model.model.{name}{ends[name]}": tensor for name, tensor in saved.items()}


def save_adapter(
    model: Any,
    tokenizer: Any,
    settings: LoraSettings,
    base: str,
    path: str | os.PathLike[str],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the adapters in peft's format, and the tokenizer; `base` names the model that they belong to. `weights` are
    those of the adapters, if the model holds them in another form."""
    from safetensors.torch import save_file

    saved = {name: t.cpu().contiguous() for name, t in (weights or adapter_weights(model)).items()}
    config = lora_config(settings, base)
    if settings.targets == "all-linear":  # peft expects names in the file
        layers = [name for name, module in model.named_modules() if _is_adapted(module) and not _of_parameter(module)]
        config.target_modules = sorted({name.split(".")[-1] for name in layers})
        made = model.peft_config[_ADAPTER]  # of adapters for experts, it has the names and ranks that peft gave them
        config.target_parameters = made.target_parameters and sorted(made.target_parameters)
        config.rank_pattern, config.alpha_pattern = made.rank_pattern, made.alpha_pattern
    config.inference_mode = True
    try:
        os.makedirs(path, exist_ok=True)
        save_file(saved, os.path.join(path, "adapter_model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(path)
        tokenizer.save_pretrained(path)
    except Exception as error:  # on a full disk safetensors raises its own class
        raise UserError(f"{path}: the adapter cannot be saved: {error}") from error


@contextmanager
def dropping_out(model: Any, seed: int) -> Iterator[None]:
    """Inside, the adapters' dropout is on, with masks that depend on the seed alone. Other random numbers continue
    afterwards as if there had been none."""
    layers = [module for module in model.modules() if _is_adapted(module)]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


class WithoutAdapter:
    """Log-probabilities under the base model, by the forward pass of the model with its adapters disabled: a reference
    that takes no extra memory."""

    def __init__(self, model: Any, forward: ResponsePass[TokenStats]) -> None:
        self._layers = [module for module in model.modules() if _is_adapted(module)]
        self._forward = forward

    @contextmanager
    def compute(self, samples: Sequence[Trajectory]) -> Iterator[TokenStats]:
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            with self._forward.compute(samples) as stats:
                yield stats
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _of_parameter(layer: Any) -> str | None:
    """The parameter that an adapter is for, if it adapts one of several in a module, such as fused experts."""
    return getattr(layer, "parameter_name", None)


@dataclass(frozen=True, slots=True)
class PlainWeight:
    name: str
    base: Tensor
    layer: Any = None
    """The layer whose adapter is merged into it, if there is one."""

    def merged(self, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """`whole` gathers a tensor that is sharded."""
        base = whole(self.base.detach())
        if self.layer is None:
            return base
        names = (f"layer.{side}.{_ADAPTER}.weight" for side in ("lora_A", "lora_B"))
        added = _Added(self.layer)
        sides = {name: whole(added.get_parameter(name).detach()) for name in names}
        delta: Tensor = torch.func.functional_call(added, sides, ())
        return _rescaled(base + delta, self.layer)


def _rescaled(weight: Tensor, layer: Any) -> Tensor:
    """The sum of a weight and its adapter; with DoRA, its rows have the lengths that are trained."""
    if not getattr(layer, _MAGNITUDE, None):
        return weight
    lengths: Tensor = getattr(layer, _MAGNITUDE)[_ADAPTER].weight.detach()
    across = 0 if layer.fan_in_fan_out else 1
    factors: Tensor = lengths / torch.linalg.norm(weight, dim=across)
    return weight * factors.unsqueeze(across)


def without_adapters(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[PlainWeight]:
    """Weights of a model, of which those of adapters become a part of others."""
    # The adapters of several weights of one module, such as its experts, are layers around each other.
    adapted = {
        f"{_plain_name(name)}.{_of_parameter(module) or 'weight'}": module
        for name, module in model.named_modules()
        if _is_adapted(module)
    }
    for name, tensor in weights:
        if ".lora_" not in name:
            yield PlainWeight(_plain_name(name), tensor, adapted.get(_plain_name(name)))


def _plain_name(name: str) -> str:
    """The name without adapters of a module or weight."""
    return name.replace(".base_layer", "")


class _Added(nn.Module):
    """What an adapter adds to the weight of its layer, as a function of the adapter's weights."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Any:
        return self.layer.get_delta_weight(_ADAPTER)
