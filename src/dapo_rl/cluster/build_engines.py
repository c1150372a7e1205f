"""Builds the engines of a cluster: in the driver what is sent to each actor, in the actor its engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dapo_rl.base.format import counted
from dapo_rl.cluster.engine_pool import EnginePool
from dapo_rl.cluster.meta_model import flesh_out, skeleton_of
from dapo_rl.cluster.ray_session import work_in
from dapo_rl.cluster.weights_object_store import StoredWeights
from dapo_rl.config import ClusterSettings, Config
from dapo_rl.engine_specs import CUSTOM, EngineSpec, engine_spec
from dapo_rl.engines.build import build_engine
from dapo_rl.engines.custom import is_engine
from dapo_rl.engines.native.kv_cache import memory_share
from dapo_rl.engines.protocol import Engine, EngineInputs
from dapo_rl.errors import UserError
from dapo_rl.memory.ranks import SHARED_SHARE
from dapo_rl.models.weights import WeightSource

SEPARATE_SHARE = 0.85
"""Of the memory of a GPU that an engine has to itself."""
COLOCATED_GPUS, SHARED_GPUS = 0.4, 0.44
"""The share of a GPU that Ray sets aside for an engine, or for all engines, beside a rank."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All that an actor needs to build its engine, except weights."""

    config: Config
    named: str | Callable[..., Any]
    skeleton: Any
    tokenizer: Any
    dtype: torch.dtype
    longest: int
    device: str
    threads: int
    kv_bytes: int | None
    """For the cache on a CPU; on a GPU it takes a share of the memory that the weights leave."""
    directory: str = "."

    def __call__(self, weights: StoredWeights) -> Engine:
        work_in(self.directory)
        torch.set_num_threads(self.threads)
        device = torch.device("cpu" if _spec(self.named).loads_from_disk else self.device)
        model = flesh_out(self.skeleton, weights, device, stored_type(self.named, self.dtype))
        kv_bytes, share = self.kv_bytes, _memory_share(self.config.cluster)
        if device.type == "cuda" and share is not None:
            kv_bytes = int(torch.cuda.mem_get_info(device)[0] * share)
        inputs = EngineInputs(
            model,
            self.tokenizer,
            self.config.sampling,
            self.dtype,
            self.longest,
            copies=False,
            kv_bytes=kv_bytes,
            releases_memory=takes_turns(self.config, torch.device(self.device)),
            options=self.config.engine_options,
            gpus=self.config.cluster.engine_gpus,
            gpu_share=share,
        )
        engine = build_engine(self.named, inputs)
        if weights.version != engine.version:
            engine.receive(weights.version, weights)
        return engine


def stored_type(named: str | Callable[..., Any], dtype: torch.dtype) -> torch.dtype | None:
    """The type in which weights are sent and held; None leaves them in float32."""
    return dtype if _spec(named).casts_weights else None


def _spec(named: str | Callable[..., Any]) -> EngineSpec:
    return engine_spec(named) if isinstance(named, str) else CUSTOM


def check_engines(cluster: ClusterSettings, device: torch.device) -> None:
    """Refuses engines for which there is no GPU, before anything is loaded."""
    if device.type == "cuda" and cluster.placement == "colocated" and cluster.engines > cluster.ranks:
        raise UserError(
            f"cluster.engines: {cluster.engines} engines cannot take turns with {counted(cluster.ranks, 'rank')}, of "
            f"which each has a GPU with room for one; use {cluster.ranks}, or cluster.placement=shared"
        )


def build_engine_pool(
    config: Config,
    named: Any,
    model: Any,
    weights: WeightSource,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    note: Callable[[str], None],
) -> EnginePool:
    """The engines of a run, on `device` each. `named` is the setting `engine`, or what the caller passes instead.
    `model` is a plain model, which needs no weights, and `weights` those to begin with. Ray is connected."""
    if not isinstance(named, str) and is_engine(named):
        raise UserError("engine: an engine object cannot be sent to a cluster; give its class")
    cluster = config.cluster
    on_gpu = device.type == "cuda"
    parts = EngineParts(
        config=config,
        named=named,
        skeleton=skeleton_of(model),
        tokenizer=tokenizer,
        dtype=dtype,
        longest=longest,
        device=device.type,
        threads=max(1, torch.get_num_threads() // cluster.engines),
        kv_bytes=None if on_gpu or cluster.engines == 1 else memory_share(device) // cluster.engines,
        directory=os.getcwd(),
    )
    return EnginePool(
        parts,
        weights,
        cluster,
        background=cluster.placement != "colocated" or cluster.engines > 1,
        dtype=stored_type(named, dtype),
        device=device.type,
        options={"num_gpus": gpu_share(cluster)} if on_gpu else {},
        note=note,
    )


def takes_turns(config: Config, device: torch.device) -> bool:
    """Whether engines give up their memory during updates."""
    together = device.type == "cuda" and config.cluster.placement == "colocated"
    return together and engine_spec(config.engine).releases_memory


def gpu_share(cluster: ClusterSettings) -> float:
    """What Ray sets aside for an engine."""
    shared = SHARED_GPUS / cluster.engines_per_gpu
    return {"colocated": COLOCATED_GPUS, "separate": cluster.engine_gpus, "shared": shared}[cluster.placement]


def _memory_share(cluster: ClusterSettings) -> float | None:
    """The share of a GPU's memory for an engine, or for its cache; None if it has the GPU in turns with a rank."""
    shared = SHARED_SHARE / cluster.engines_per_gpu
    return {"colocated": None, "separate": SEPARATE_SHARE, "shared": shared}[cluster.placement]
