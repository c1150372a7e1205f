"""Builds the engine that the settings name or the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dapo_rl.base.load import load_function, spec_of
from dapo_rl.base.quote import describe, describe_traceback
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.choices import ENGINES, is_function
from dapo_rl.config import SamplingSettings
from dapo_rl.engines.custom import ENGINE_METHODS, CustomEngine
from dapo_rl.engines.hf import HFEngine
from dapo_rl.engines.native.engine import NativeEngine
from dapo_rl.engines.protocol import Engine
from dapo_rl.errors import UserError
from dapo_rl.models.reserved_memory import can_reserve

MAX_BATCH = 1024
"""Concurrent sequences: the cost per sequence falls up to about this number."""
MAX_BATCH_OF_GENERATE = 256
"""Lower for `generate`, which does not limit its memory."""


def build_engine(
    named: str | Callable[..., Any],
    model: Any,
    tokenizer: Any,
    settings: SamplingSettings,
    dtype: torch.dtype,
    longest: int = 0,
    copies: bool = True,
    kv_bytes: int | None = None,
    rests: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine that samples from `model` and computes in `dtype`. `longest` is the longest context of the run. Without
    `copies` nothing else may use the model afterwards, so that the native engine needs no copy of it. `kv_bytes` is the
    size of the native engine's cache, unless the settings give it; with `rests`, `native` and `vllm` can give up their
    memory. `options` are the setting `engine_options`.

    `named` is the setting `engine`, or a class or function that is called like a custom engine:
    `Class(model, tokenizer, settings, dtype=dtype, longest=longest, **options)`.
    """
    options = options or {}
    if named == "native":
        memory = kv_bytes if settings.kv_memory_gib is None else int(settings.kv_memory_gib * 2**30)
        return NativeEngine(
            model,
            tokenizer,
            dtype=dtype,
            max_batch=settings.max_batch or MAX_BATCH,
            kv_memory_bytes=memory,
            longest=longest,
            copies=copies,
            rests=rests,
        )
    if named == "hf":
        return HFEngine(model, tokenizer, settings.max_batch or MAX_BATCH_OF_GENERATE, dtype)
    if named == "vllm":
        from dapo_rl.engines.vllm import VLLMEngine

        return VLLMEngine(model, tokenizer, settings, dtype, max_model_len=longest or None, rests=rests, **options)
    name, make = (named, _load(named)) if isinstance(named, str) else (spec_of(named), named)
    try:
        engine = make(model, tokenizer, settings, dtype=dtype, longest=longest, **options)
    except (UserError, KeyboardInterrupt, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        raise UserError(f"engine: {name} raised {describe(error)}", describe_traceback(error)) from error
    try:
        return CustomEngine(engine, name, vocabulary_of(model))
    except UserError:
        close_engine(engine)
        raise


def can_rest(named: str, device: torch.device) -> bool:
    """Whether the engine that the setting names can give up its memory during updates."""
    return named == "native" and can_reserve(device)


def vocabulary_of(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def is_engine(given: Any) -> bool:
    """Whether `given` is an engine, rather than a class or function that makes one."""
    return not isinstance(given, type) and (not callable(given) or all(hasattr(given, m) for m in ENGINE_METHODS))


def _load(spec: str) -> Callable[..., Any]:
    if not is_function(spec):
        hint = did_you_mean(nearest(spec, ENGINES), f"there are {', '.join(ENGINES)}")
        raise UserError(f"engine: there is no engine {spec!r}{hint}")
    try:
        return load_function(spec)
    except UserError as error:
        raise UserError(f"engine: {error}", error.more) from error


def close_engine(engine: Engine) -> None:
    """Calls the engine's `close` method, if it has one."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


@contextmanager
def closing_engine(engine: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        close_engine(engine)
