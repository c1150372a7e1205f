"""The engine that a setting names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.config import SamplingSettings
from dapo_rl.errors import UserError
from dapo_rl.rollout.engine import Engine
from dapo_rl.rollout.hf import HFEngine
from dapo_rl.rollout.native.engine import NativeEngine

ENGINES = ("native", "hf", "vllm")
MAX_BATCH = 1024
"""Sequences at the same time: what one more costs falls up to there."""
MAX_BATCH_OF_GENERATE = 256
"""`generate` bounds no memory."""


def build_engine(
    name: str, model: Any, tokenizer: Any, settings: SamplingSettings, dtype: torch.dtype, longest: int = 0
) -> Engine:
    """Samples from `model`, computing in `dtype`. `longest` is the longest context to come."""
    if name == "native":
        memory = None if settings.kv_memory_gib is None else int(settings.kv_memory_gib * 2**30)
        return NativeEngine(
            model,
            tokenizer,
            dtype=dtype,
            max_batch=settings.max_batch or MAX_BATCH,
            kv_memory_bytes=memory,
            longest=longest,
        )
    if name == "hf":
        return HFEngine(model, tokenizer, settings.max_batch or MAX_BATCH_OF_GENERATE, dtype)
    if name == "vllm":
        from dapo_rl.rollout.vllm import VLLMEngine

        return VLLMEngine(model, tokenizer, settings, dtype, max_model_len=longest or None)
    hint = did_you_mean(nearest(name, ENGINES), f"there are {', '.join(ENGINES)}")
    raise UserError(f"engine: there is no engine {name!r}{hint}")


def close_engine(engine: Engine) -> None:
    """Ends the processes of an engine that has some: such an engine has a method `close`."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


@contextmanager
def closing_engine(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        close_engine(engine)
