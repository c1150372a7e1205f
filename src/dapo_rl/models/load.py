"""Loads and saves a Hugging Face causal language model and its tokenizer, or the tiny one inside the package."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from dapo_rl.base.home import expanded
from dapo_rl.base.hub import cache_only, hub_problem
from dapo_rl.base.suggest import did_you_mean, nearest_path
from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.config_limits import check_config, check_config_size
from dapo_rl.models.download import PRETRAINED, find_pretrained
from dapo_rl.models.weights import BUCKET_BYTES, WeightSource

TINY = Path(__file__).parent / "tiny"
"""The embedded model: a Llama of about a million parameters that does step-by-step arithmetic."""
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
HEADS = ("score", "classifier", "classification_head", "pre_classifier", "pooler", "v_head")
"""The first parts of the names of classification heads' weights."""
CPU_FEATURES = Path("/proc/cpuinfo")


def load_model(settings: ModelSettings) -> tuple[Any, Any]:
    """The model, in float32 on its device, and the tokenizer."""
    name, device = settings.name, pick_device(settings.device)
    with _located(name) as path:
        _check_config(path, name)
        tokenizer = _tokenizer(path, name)
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
                weights_only=True,
            )
        except Exception as error:
            raise UserError(f"model.name: {name} {_why_no_model(error, path)}") from None
    _check_weights(model, loading, name)
    check_tokenizer(tokenizer, name)
    _check_ends(model, name)
    make_savable(model)
    try:
        return model.to(device), tokenizer
    except torch.OutOfMemoryError:
        gibibytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        raise UserError(
            f"model.name: the weights of {name} need {gibibytes:.1f} GiB, more than is free on the GPU; "
            "use a smaller model, or stop other programs on the GPU"
        ) from None


def load_empty(settings: ModelSettings) -> tuple[Any, Any]:
    """The model without its weights, on torch's meta device, and the tokenizer."""
    name = settings.name
    with _located(name) as path:
        _check_config(path, name)
        tokenizer = _tokenizer(path, name)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"model.name: {name} {_why_no_model(error, path)}") from None
        with suppress(OSError, ValueError):  # a model need not have one; its stop tokens end responses
            model.generation_config = GenerationConfig.from_pretrained(path)
    check_tokenizer(tokenizer, name)
    make_savable(model)
    return model.eval(), tokenizer


def load_reward_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model with a classification head of one label, and its tokenizer; raises a UserError without a key."""
    try:
        with _located(name) as path:
            return _load_reward_model(path, name, device, dtype)
    except UserError as error:
        raise UserError(str(error).removeprefix("model.name: "), error.more) from None


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model that was loaded under this name."""
    with _located(name) as path:
        return _tokenizer(path, name)


@contextmanager
def _located(name: str) -> Iterator[str | Path]:
    """A directory, or a name on the hub; inside, its cache alone is used while the hub cannot be reached."""
    path = find_model(name)
    problem = None if isinstance(path, Path) else hub_problem()
    if problem:
        _check_cached(name, problem)
    with cache_only() if problem else nullcontext():
        yield path


def _tokenizer(path: str | Path, name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a missing file, a damaged one, an unknown class: each raises another type
        what = f"the tokenizer of {name}" if isinstance(path, Path) else name
        raise UserError(f"model.name: {what} {_why_not(error, 'tokenizer_config.json')}") from None


def _check_config(path: str | Path, name: str) -> None:
    """Before transformers builds anything of it."""
    if isinstance(path, Path):
        _check_directory(path, name)
    check_config_size(path)
    try:
        found = PreTrainedConfig.get_config_dict(path)[0]
    except Exception as error:
        raise UserError(f"model.name: {name} {_why_not(error, 'config.json')}") from None
    check_config(found, name)


def _load_reward_model(path: str | Path, name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    _check_config(path, name)
    tokenizer = _tokenizer(path, name)
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, trust_remote_code=False, weights_only=True
        )
    except Exception as error:
        raise UserError(f"{name} {_why_not(error, 'config.json')}") from None
    if new := [key for key in loading["missing_keys"] if key.split(".")[0] in HEADS]:
        raise UserError(
            f"{name} has no classification head ({new[0]} is not among its weights): it is not a reward model but a "
            "language model"
        )
    check_one_label(model, name)
    _check_weights(model, loading, name)
    return model.eval().requires_grad_(False).to(device), tokenizer


def check_one_label(model: Any, name: str) -> None:
    """Rejects a classifier of several classes, whose outputs are no score."""
    if (labels := getattr(model.config, "num_labels", None)) != 1:
        raise UserError(f"{name} has {labels} labels; a reward model has one, the score")


def find_model(name: str) -> str | Path:
    """The directory of the embedded model, of one from `dapo model get` or of another, or else a name on the hub."""
    if name == "tiny":
        return TINY
    if name in PRETRAINED:
        return find_pretrained(name)
    path = expanded(name)
    if not name.strip():
        raise UserError("model.name: it is empty; give a directory, a hub name, or tiny")
    if path.is_file():
        raise UserError(f"model.name: {name} is a file; give the directory that holds config.json and the weights")
    if path.exists():
        return path
    if name.startswith((".", "/", "~")):
        raise UserError(f"model.name: no directory {name}{did_you_mean(nearest_path(path, Path.is_dir))}")
    return name


def _check_directory(path: Path, name: str) -> None:
    if not (path / "config.json").is_file():
        raise UserError(f"model.name: {name} has no config.json; a model is a directory in Hugging Face's format")
    if not any(next(path.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise UserError(f"model.name: {name} has no tokenizer (no tokenizer.json); save it beside the weights")


def _check_cached(name: str, problem: str) -> None:
    """Rejects a hub name that is not in the cache while the hub cannot be reached."""
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # transformers says what is wrong with the name
        return
    if not isinstance(found, str):
        raise UserError(
            f"model.name: {name} is not in the cache, and the hub cannot be reached ({problem}); check the network, or "
            "give the directory of a model"
        )


def _check_weights(model: Any, loading: Mapping[str, Any], name: str) -> None:
    """Rejects incomplete weights: transformers would initialise missing or mismatched ones at random."""
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise UserError(
            f"model.name: the weights of {name} do not match its config.json: {key} is {_shape(stored)}, and "
            f"config.json says {_shape(expected)}"
        )
    parameters = dict(model.named_parameters())
    missing = sorted(key for key in loading["missing_keys"] if key in parameters)
    if missing:
        raise UserError(
            f"model.name: {name} has no weights for {len(missing)} of its {len(parameters)} tensors ({missing[0]}); "
            "its config.json may belong to another model"
        )
    for key, parameter in parameters.items():
        if not torch.isfinite(parameter.detach().sum()):
            raise UserError(f"model.name: the weights of {name} are damaged: {key} has numbers that are not finite")


def _shape(size: Any) -> str:
    return " × ".join(str(n) for n in size)


def _check_ends(model: Any, name: str) -> None:
    """transformers does not check the end-of-sequence tokens in generation_config.json."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and type(token) is not int:
            raise UserError(
                f"model.name: generation_config.json of {name}: eos_token_id is {token!r}, not the id of a token"
            )


def _why_no_model(error: Exception, path: str | Path) -> str:
    try:
        settings: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception:  # it is the reason that the model cannot be loaded
        settings = None
    return _takes_media(settings) or _why_not(error, "config.json")


def refuse_media_model(model: Any) -> None:
    """Raises UserError for a loaded model of images or audio, unless its architecture is one of text too."""
    settings = getattr(model, "config", None)
    if type(settings) not in AutoModelForCausalLM._model_mapping and (why := _takes_media(settings)):
        raise UserError(f"model: {type(model).__name__} {why}")


def _takes_media(settings: Any) -> str | None:
    """The end of a message about a model for images or audio, by its config; None for one of text."""
    kinds = {"vision_config": "images", "audio_config": "audio"}
    kind = next((kind for name, kind in kinds.items() if getattr(settings, name, None) is not None), None)
    if kind is None:
        return None
    return f"is a model of {kind} and text ({settings.model_type}), and {kind} are not supported; use a model of text"


def _why_not(error: Exception, file: str) -> str:
    """The end of a message about what cannot be loaded; `file` is the one that may refer to code."""
    if "trust_remote_code" in str(error):
        return (
            f"needs Python code of its own (auto_map in {file}), and no code from a model is ever run; use a model "
            "that transformers has a class for, or load it in Python and pass it to DAPOTrainer"
        )
    return f"cannot be loaded: {_reason(error)}"


def _reason(error: Exception) -> str:
    reason, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if reason.endswith(":") and more:
        reason = f"{reason} {more[0]}"
    if isinstance(error, pickle.UnpicklingError):
        return "its pickled weights are damaged or hold more than tensors, which is never run; save it as safetensors"
    if isinstance(error, SafetensorError):
        return f"a file of its weights is damaged or cut off ({reason})"
    if other := re.search(r"(\w+)'> for this kind of AutoModel", reason):
        return f"{other[1]} does not belong to a causal language model"
    return reason


def to_float32(model: Any) -> str | None:
    """Converts weights to float32 in place, and returns a note if it did: narrower types lose small updates."""
    narrow = {p.dtype for p in model.parameters()} & {torch.bfloat16, torch.float16}
    if not narrow:
        return None
    model.float()
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    return f"the model's {names} weights are trained in float32; model.dtype sets the compute type"


def make_savable(model: Any) -> None:
    """Some published models set a temperature with do_sample=false, which transformers loads but refuses to save."""
    settings = model.generation_config
    try:
        if settings is not None:
            settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def check_context(model: Any, longest_prompt: int, new_tokens: int) -> None:
    """Fails now: a model with learned positions would fail on a token beyond them in the middle of a run."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and longest_prompt + new_tokens > limit:
        raise UserError(
            f"sampling.max_new_tokens: {new_tokens} after a prompt of {longest_prompt} tokens exceeds the model's "
            f"context of {limit}; lower it or data.max_prompt_tokens"
        )


def context_of(name: str) -> int | None:
    """The most tokens that a model is made for, by its config, if that says so. Its weights are not loaded."""
    with _located(name) as path:
        _check_config(path, name)
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"model.name: {name} {_why_no_model(error, path)}") from None
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def check_vocabulary(model: Any, largest_id: int) -> None:
    """Fails now: another model's tokenizer would fail in the middle of a run, at the first token out of range."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    if largest_id >= rows:
        raise UserError(
            f"model.name: the tokenizer produces token {largest_id}, but the model has {rows} tokens; the tokenizer "
            "belongs to another model, or the embeddings must be resized"
        )


def copy_in(model: Any, dtype: torch.dtype) -> Any:
    """A frozen copy of a model with its parameters in `dtype`, made one by one: there is never another copy in the
    original type. Buffers (rotary frequencies) keep theirs."""
    made: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to(dtype, copy=True), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, made)


def take_over(model: Any, source: WeightSource) -> None:
    """Copies weights into a model, except those that it already shares."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for bucket in source.buckets(BUCKET_BYTES):
            stale = [(own[name], tensor) for name, tensor in bucket if own[name].data_ptr() != tensor.data_ptr()]
            if stale:
                torch._foreach_copy_([mine for mine, _ in stale], [theirs for _, theirs in stale])


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Rejects a tokenizer without an end-of-sequence token: every response would reach the length limit."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name: the tokenizer of {name} has no end-of-sequence token; set its eos_token")


def pad_id(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda was requested, but there is no CUDA GPU; use auto or cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """The compute type; trained weights are always float32."""
    if settings.dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of the weights of a model that was loaded under this name, as its config.json says."""
    path = find_model(name)
    if path == TINY:  # stored in bfloat16 to keep the package small
        return torch.float32
    with cache_only():
        dtype = AutoConfig.from_pretrained(path, trust_remote_code=False).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def saved_dtype(settings: ModelSettings, came: torch.dtype) -> torch.dtype:
    if settings.save_dtype == "auto":
        return came if came in (torch.bfloat16, torch.float16) else torch.float32
    dtype: torch.dtype = getattr(torch, settings.save_dtype)
    return dtype


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """A note for the user if the chosen type is emulated, which is many times slower."""
    if dtype == torch.bfloat16 and not _multiplies_bfloat16(device):
        return f"model.dtype: this {device.type} has no native bfloat16; float32 is many times faster on it"
    return None


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware supports it natively; emulation costs more than it saves."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        words = set(CPU_FEATURES.read_text().split())
    except OSError:
        return False
    return device.type == "cpu" and not words.isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def describe_model(model: Any, dtype: torch.dtype, where: str | None = None) -> str:
    """A short description of a model: `LlamaForCausalLM, 0.9 M parameters, float32 on cpu`; `where` replaces the
    device."""
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    share = "" if trained == millions else f", of which {trained:,.2f} M are trained"
    size = f"{type(model).__name__}, {millions:,.1f} M parameters{share}"
    where = where or next(model.parameters()).device.type
    return f"{size}, {str(dtype).removeprefix('torch.')} on {where}"
