"""Policy, critic and memory plan of a run in one process."""

from __future__ import annotations

from typing import Any

import torch

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.memory.model_size import ModelSize
from dapo_rl.memory.one_gpu import MemoryPlan, PlanSettings, plan_memory
from dapo_rl.memory.sizes import RUNTIME, RunSizes, run_sizes
from dapo_rl.models.load import compute_dtype, pad_id
from dapo_rl.models.recompute import can_recompute
from dapo_rl.train.critic import HFCritic
from dapo_rl.train.policy import HFPolicy, policy_settings
from dapo_rl.train.reference import build_reference


def build_policy(
    model: Any,
    tokenizer: Any,
    config: Config,
    longest: int,
    plan: MemoryPlan,
    save_dtype: torch.dtype | None = None,
) -> HFPolicy:
    """The policy that a run trains, with its optimizer; `longest` is the longest sample, and `save_dtype` the type of
    saved models."""
    budget = config.train.token_budget or plan.token_budget
    return HFPolicy(
        model,
        pad_id=pad_id(tokenizer),
        train=config.train.model_copy(update={"gradient_checkpointing": plan.recompute}),
        token_budget=budget or config.token_budget,
        fill_memory=budget is None,
        time_share=plan.time_share,
        longest=longest,
        dtype=compute_dtype(config.model, next(model.parameters()).device),
        # In turns, a teacher is on the host until it scores.
        reference=build_reference(model, tokenizer, config, "cpu" if plan.time_share else None),
        save_dtype=save_dtype,
        **policy_settings(config, tokenizer),
    )


def build_critic(model: Any, tokenizer: Any, config: Config, longest: int, plan: MemoryPlan, packed: bool) -> HFCritic:
    """The critic that a run trains; `packed` as the policy is."""
    budget = config.train.token_budget or plan.token_budget or config.token_budget
    return HFCritic(
        model,
        pad_id=pad_id(tokenizer),
        train=config.train.model_copy(update={"gradient_checkpointing": plan.recompute, "packed": packed}),
        token_budget=budget,
        value_clip=config.critic.value_clip,
        time_share=plan.time_share,
        longest=longest,
        dtype=compute_dtype(config.model, next(model.parameters()).device),
    )


def memory_plan(
    config: Config, model: Any, longest: int, engine_releases_memory: bool, *, has_engine: bool = True
) -> MemoryPlan:
    """What stays in GPU memory; raises a UserError if the run cannot fit."""
    wanted = config.train.gradient_checkpointing
    sizes = _sizes_on_gpu(config, model, longest)
    if sizes is None:
        if config.train.memory == "time_share":
            raise UserError("train.memory: time_share needs a GPU and a known architecture; set train.memory=auto")
        return MemoryPlan(recompute=wanted is True)
    if not has_engine:
        sizes = sizes.without_engine()
    recompute = False if wanted == "auto" and not can_recompute(model) else wanted
    return plan_memory(sizes, PlanSettings(config.train.memory, recompute, engine_releases_memory))


def _sizes_on_gpu(config: Config, model: Any, longest: int) -> RunSizes | None:
    """None on a CPU, and for an architecture with an unusual config: such a run finds out what fits."""
    device, lora = next(model.parameters()).device, config.model.lora
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # What others leave free, and what this process has taken; its CUDA context is part of RUNTIME.
    gpu = min(total, free + torch.cuda.memory_reserved(device) + RUNTIME)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        size = ModelSize.of(model)
        return run_sizes(
            config,
            size,
            gpu,
            bfloat16=compute_dtype(config.model, device) == torch.bfloat16,
            trained=trained if lora is None else None,
            longest=longest,
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        return None
