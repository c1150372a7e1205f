"""Loading and saving: a Hugging Face causal language model and its tokenizer, or the tiny one inside the package."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError

TINY = Path(__file__).parent / "tiny"
"""The embedded model: a Llama of about a million parameters that does arithmetic in steps."""
CPU_FEATURES = Path("/proc/cpuinfo")


def load_model(settings: ModelSettings) -> tuple[Any, Any]:
    """The model, on its device and in float32, and the tokenizer."""
    name = settings.name
    path: str | Path = TINY if name == "tiny" else Path(name).expanduser()
    if name != "tiny" and not Path(path).exists():
        if name.startswith((".", "/", "~")):
            raise UserError(f"model.name: no directory {name}{_nearby(Path(path))}")
        path = name
    device = pick_device(settings.device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # a missing file, a damaged one, an unknown architecture: each has its own class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model.name: {name} cannot be loaded: {reason}") from None
    check_tokenizer(tokenizer, name)
    make_savable(model)
    return model.to(device), tokenizer


def to_float32(model: Any) -> str | None:
    """Makes trained weights float32, in place, and says so: in a narrower type, small updates round away."""
    narrow = {p.dtype for p in model.parameters()} & {torch.bfloat16, torch.float16}
    if not narrow:
        return None
    model.float()
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    return f"the model's {names} weights are trained in float32; model.dtype says what is computed in"


def make_savable(model: Any) -> None:
    """Publishers leave a temperature beside do_sample=false; transformers loads that, and refuses to save it."""
    settings = model.generation_config
    try:
        if settings is not None:
            settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


def check_context(model: Any, longest_prompt: int, new_tokens: int) -> None:
    """A model with learnt positions fails on a token beyond them, in the middle of a run."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and longest_prompt + new_tokens > limit:
        raise UserError(
            f"sampling.max_new_tokens: {new_tokens} after a prompt of {longest_prompt} tokens, and the model is made "
            f"for {limit}; lower it, or data.max_prompt_tokens"
        )


def save_model(model: Any, tokenizer: Any, path: str | os.PathLike[str]) -> None:
    """The model and its tokenizer in Hugging Face format."""
    if Path(path).is_file():  # transformers would log that, and save nothing
        raise UserError(f"{path}: a model is saved as a directory, and there is a file of that name")
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    except Exception as error:  # on a full disk safetensors raises a class of its own
        raise UserError(f"{path}: the model cannot be saved: {error}") from error


def take_over(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a model's own; those that are its own already stay as they are."""
    own = dict(model.named_parameters())
    stale = [(own[name], tensor) for name, tensor in weights.items() if own[name].data_ptr() != tensor.data_ptr()]
    if stale:
        with torch.no_grad():
            torch._foreach_copy_([mine for mine, _ in stale], [theirs for _, theirs in stale])


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Without an end-of-sequence token every response would run into the limit."""
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name: the tokenizer of {name} has no end-of-sequence token; set its eos_token")


def pad_id(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: cuda is asked for and there is no CUDA GPU here; use auto or cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """What is computed in; the weights that are trained are float32 whatever this is."""
    if settings.dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    dtype = getattr(torch, settings.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """A line for the user where a named type is a hundred times slower than the other."""
    if dtype == torch.bfloat16 and not _multiplies_bfloat16(device):
        return f"model.dtype: this {device.type} does not multiply bfloat16; float32 is many times faster on it"
    return None


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware does, rather than a detour over float32, which costs more than it saves."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        words = set(CPU_FEATURES.read_text().split())
    except OSError:
        return False
    return device.type == "cpu" and not words.isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def describe(model: Any, dtype: torch.dtype) -> str:
    """One line about a model for the display: `LlamaForCausalLM, 0.9 M parameters, float32 on cpu`."""
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    device = next(model.parameters()).device.type
    return f"{type(model).__name__}, {millions:,.1f} M parameters, {str(dtype).removeprefix('torch.')} on {device}"


def _nearby(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
