"""Builds the policy on ranks from the settings of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo_rl.base.host_memory import host_memory
from dapo_rl.cluster.distributed_policy import DistributedPolicy
from dapo_rl.cluster.ray_ranks import Place, RayRanks
from dapo_rl.cluster.ray_session import import_ray, ray_logs, work_in
from dapo_rl.config import Config
from dapo_rl.errors import RankLostError, UserError
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.memory.ranks import RankMemory
from dapo_rl.models.load import find_model, load_model, pad_id, pick_device
from dapo_rl.models.lora import add_lora
from dapo_rl.models.recompute import can_recompute
from dapo_rl.train.critic import first_critic
from dapo_rl.train.policy import policy_settings
from dapo_rl.train.random_state import seed_everything
from dapo_rl.train.reference import build_reference

RANK_GPUS = {"colocated": 0.6, "separate": 1.0, "shared": 0.55}
"""The share of a GPU that Ray sets aside for a rank. What it leaves to engines is too little for another rank."""
ALONE = "or leave out cluster.backend"


def check_ranks(config: Config, *, loaded: bool) -> None:
    """Refuses what cannot be trained on ranks; `loaded` if the caller has passed a loaded model."""
    if loaded:
        raise UserError(f"model: a loaded model cannot be sent to ranks; give its name or directory, {ALONE}")
    if config.train.memory == "time_share":
        raise UserError(f"train.memory: time_share is for one process; use cluster.placement=colocated, {ALONE}")


def ranks_device(config: Config) -> torch.device:
    """Where ranks compute: on GPUs if the Ray cluster has them."""
    ray, wanted = import_ray(), config.model.device
    if not ray.is_initialized():
        return pick_device(wanted)
    gpus, ranks = int(ray.cluster_resources().get("GPU", 0)), config.cluster.ranks
    if wanted == "cuda" and not gpus:
        raise UserError("model.device: cuda was requested, but the Ray cluster has no GPU; use auto or cpu")
    if wanted == "cpu" or not gpus:
        return torch.device("cpu")
    if ranks > gpus:
        raise UserError(f"cluster.ranks: {ranks} ranks need a GPU each, and the Ray cluster has {gpus}; lower it")
    return torch.device("cuda")


def build_distributed_policy(
    config: Config, model: Any, tokenizer: Any, longest: int, save_dtype: torch.dtype
) -> DistributedPolicy:
    """Starts the ranks, which load the model themselves; `model` is the same without its weights, and `longest` the
    longest sample of the run."""
    cluster, on_gpu = config.cluster, ranks_device(config).type == "cuda"
    found = find_model(config.model.name)
    source = str(found.resolve()) if isinstance(found, Path) else found  # a rank may have another working directory
    wanted = config.train.gradient_checkpointing
    memory = RankMemory.of(config, model, config.model.dtype == "bfloat16", longest) if on_gpu else None
    # Where it is not known what fits.
    recompute = wanted is True or (wanted == "auto" and on_gpu and can_recompute(model))
    recipe = RankRecipe(config, source, tokenizer, longest, save_dtype, memory, recompute, os.getcwd())
    start: Callable[[], RayRanks] = partial(
        RayRanks,
        recipe,
        cluster.ranks,
        on_gpu=on_gpu,
        gpus=RANK_GPUS[cluster.placement] if on_gpu else 0.0,
        threads=max(1, torch.get_num_threads() // cluster.ranks),
        timeout_s=cluster.timeout_s,
    )
    try:
        return DistributedPolicy(start)
    except RankLostError as error:
        advice = error.advice or f"look for the cause in {ray_logs()}"
        raise UserError(f"cluster.ranks: the ranks cannot be started: {error}; {advice}") from error


@dataclass(frozen=True, slots=True)
class RankRecipe:
    """Builds a rank's part of the policy. It is sent to every rank."""

    config: Config
    source: str
    """Where the model is loaded from."""
    tokenizer: Any
    longest: int
    save_dtype: torch.dtype
    memory: RankMemory | None
    """Decides how much is kept in GPU memory; None on a CPU, and for an unknown architecture."""
    recompute: bool
    """Whether layers are recomputed if there is no `memory`."""
    directory: str = "."

    def __call__(self, place: Place) -> Any:
        from transformers.utils import logging

        from dapo_rl.cluster.policy_worker import CriticWorker, PolicyWorker

        work_in(self.directory)
        logging.disable_progress_bar()
        config = self.config
        seed_everything(config.seed)
        plan = self._plan(place)
        dtype = getattr(torch, config.model.dtype)
        assert isinstance(dtype, torch.dtype), "the driver resolves `auto`"
        how: dict[str, Any] = {
            "place": place,
            "offload": config.cluster.offload,
            "pad_id": pad_id(self.tokenizer),
            "token_budget": plan.token_budget or config.token_budget,
            "longest": self.longest,
            "dtype": dtype,
        }
        train = config.train.model_copy(update={"gradient_checkpointing": plan.recompute})
        settings = policy_settings(config, self.tokenizer)
        policy = PolicyWorker(self._load, train=train, save_dtype=self.save_dtype, **settings, **how)
        policy.plan = plan
        if config.has_critic:
            train = train.model_copy(update={"packed": policy.packed})
            policy.critic = CriticWorker(self._load_critic, train=train, value_clip=config.critic.value_clip, **how)
        return policy

    def _plan(self, place: Place) -> MemoryPlan:
        """The plan for the smallest of the GPUs, the same on all ranks; raises a UserError if the run does not fit."""
        if self.memory is None:
            return MemoryPlan(recompute=self.recompute)
        here = torch.cuda.get_device_properties(place.device).total_memory, host_memory() // place.of_host
        everywhere: list[Any] = [None] * place.world_size
        dist.all_gather_object(everywhere, here)
        return self.memory.plan(*(min(of_ranks) for of_ranks in zip(*everywhere, strict=True)))

    def _load(self) -> tuple[Any, dict[str, Any]]:
        model, config = self._load_model(), self.config
        if config.model.lora is not None:
            add_lora(model, config.model.lora, config.seed)
        return model, {"reference": build_reference(model, self.tokenizer, config, "cpu")}

    def _load_critic(self) -> tuple[Any, dict[str, Any]]:
        return first_critic(self._load_model(), self.tokenizer, self.config), {}

    def _load_model(self) -> Any:
        """On the host: a layer is moved to the device when it is sharded."""
        model, _ = load_model(self.config.model.model_copy(update={"name": self.source, "device": "cpu"}))
        return model
