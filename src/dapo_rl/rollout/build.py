"""The engine that a setting names."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.rollout.engine import Engine
from dapo_rl.rollout.hf import HFEngine

ENGINES = ("hf", "vllm")


def build_engine(name: str, model: Any, tokenizer: Any, settings: SamplingSettings, dtype: torch.dtype) -> Engine:
    """Samples from `model` in `dtype`; `hf` samples from the module as it is."""
    if name == "hf":
        return HFEngine(model, tokenizer, settings.max_batch)
    if name == "vllm":
        from dapo_rl.rollout.vllm import VLLMEngine

        return VLLMEngine(model, tokenizer, settings, dtype)
    close = difflib.get_close_matches(name, ENGINES, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(ENGINES)}"
    raise UserError(f"engine: there is no engine {name!r}{hint}")
