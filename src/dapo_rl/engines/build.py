"""Builds the engine that the settings name or the caller passes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.custom import build_custom_engine
from dapo_rl.engines.protocol import Engine, EngineInputs
from dapo_rl.models.reserved_memory import can_reserve


def build_engine(named: str | Callable[..., Any], inputs: EngineInputs) -> Engine:
    """An engine that samples from a model. `named` is the setting `engine`, or a class or function that is called like
    a custom engine."""
    module = engine_spec(named).module if isinstance(named, str) else None
    if module is None:
        return build_custom_engine(named, inputs)
    engine: Engine = import_module(module).build(inputs)
    return engine


def can_release_memory(named: str, device: torch.device) -> bool:
    """Whether the engine that the setting names can free its memory during updates, in this process."""
    return engine_spec(named).releases_memory_in_process and can_reserve(device)
