"""Where a run computes: in this process, or in Ray actors (`cluster.backend: ray`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from dapo_rl.base.format import counted
from dapo_rl.cluster.build_engines import build_engine_pool, check_engines, takes_turns
from dapo_rl.cluster.build_policy import build_distributed_policy, check_ranks, ranks_device
from dapo_rl.cluster.distributed_policy import DistributedCritic, DistributedPolicy
from dapo_rl.cluster.ray_session import ray_cluster
from dapo_rl.config import Config, ModelSettings
from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.build import build_engine, can_release_memory
from dapo_rl.engines.custom import CustomEngine, is_engine, vocabulary_of
from dapo_rl.engines.protocol import Engine, EngineInputs
from dapo_rl.memory.one_gpu import MemoryPlan
from dapo_rl.models.load import copy_in, load_empty, load_model
from dapo_rl.models.lora import add_lora, has_lora, merged_copy, train_adapters
from dapo_rl.models.weights import ModelWeights
from dapo_rl.run.build_policy import build_critic, build_policy, memory_plan
from dapo_rl.run.inputs import TrainerInputs
from dapo_rl.runs.display import Display
from dapo_rl.train.critic import HFCritic, first_critic
from dapo_rl.train.policy import HFPolicy


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what is known about computing with it."""

    model: Any
    tokenizer: Any
    longest: int
    """Tokens of the longest possible sample."""
    context: int
    """Tokens of the longest request to the engine, with those of judges."""
    dtype: torch.dtype
    save_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Workers:
    engine: Engine
    policy: HFPolicy | DistributedPolicy
    critic: HFCritic | DistributedCritic | None
    plan: MemoryPlan
    restart: Callable[[], None] | None
    """Starts the ranks again, if there are ranks."""


class Backend:
    """Engine, policy and critic in this process; `RayBackend` has them in Ray actors."""

    def __init__(self, config: Config, inputs: TrainerInputs) -> None:
        self._config, self._inputs = config, inputs

    @property
    def where(self) -> str | None:
        """The place for the description of the run; None: the model's device."""
        return None

    def start(self, resources: ExitStack) -> None:
        """Connects to what the run computes on; `resources` end the connection."""

    def device(self) -> torch.device:
        return self._inputs.device(self._config)

    def load(self, settings: ModelSettings) -> tuple[Any, Any]:
        return load_model(settings)

    def build(self, config: Config, loaded: LoadedModel, resources: ExitStack, display: Display) -> Workers:
        model, tokenizer, longest = loaded.model, loaded.tokenizer, loaded.longest
        plan = memory_plan(config, model, longest, can_release_memory(config.engine, next(model.parameters()).device))
        values = None
        if config.has_critic:  # before the model gets new adapters
            values = first_critic(merged_copy(model) if has_lora(model) else model, tokenizer, config)
        sampled = prepare_lora(config, loaded)
        engine = build_local_engine(config, self._inputs, loaded, sampled, plan)
        resources.callback(engine.close)
        policy = build_policy(model, tokenizer, config, longest, plan, loaded.save_dtype)
        critic = None if values is None else build_critic(values, tokenizer, config, longest, plan, policy.packed)
        return Workers(engine, policy, critic, plan, None)


def prepare_lora(config: Config, loaded: LoadedModel) -> Any:
    """Adds the adapters that the settings ask for, or trains those that the model has. Returns the model to sample
    from: a plain copy that receives weights with the adapters merged in, or without LoRA the model itself."""
    model = loaded.model
    if has_lora(model):
        plain = merged_copy(model)
        train_adapters(model)
        return plain
    if config.model.lora is None:
        return model
    narrow = engine_spec(config.engine).casts_weights and next(model.parameters()).is_cuda
    plain = copy_in(model, loaded.dtype if narrow else torch.float32)
    add_lora(model, config.model.lora, config.seed)
    return plain


def build_local_engine(
    config: Config, inputs: TrainerInputs, loaded: LoadedModel, sampled: Any, plan: MemoryPlan
) -> Engine:
    model = loaded.model
    if inputs.engine is not None and is_engine(inputs.engine):
        engine = CustomEngine(inputs.engine, config.engine, vocabulary_of(model))
        engine.receive(0, ModelWeights(model))  # it may hold other weights
        return engine
    built_from = EngineInputs(
        sampled,
        loaded.tokenizer,
        config.sampling,
        loaded.dtype,
        loaded.context,
        copies=sampled is model,
        kv_bytes=plan.kv_bytes,
        releases_memory=plan.time_share,
        options=config.engine_options,
    )
    return build_engine(config.engine if inputs.engine is None else inputs.engine, built_from)


class RayBackend(Backend):
    """Engines and training ranks as Ray actors. This process has the model without its weights."""

    def __init__(self, config: Config, inputs: TrainerInputs) -> None:
        check_ranks(config, loaded=not inputs.names_a_model)
        super().__init__(config, inputs)

    @property
    def where(self) -> str | None:
        return f"{counted(self._config.cluster.ranks, 'rank')} ({self.device().type})"

    def start(self, resources: ExitStack) -> None:
        resources.enter_context(ray_cluster(self._config.cluster))
        check_engines(self._config.cluster, self.device())

    def device(self) -> torch.device:
        return ranks_device(self._config)

    def load(self, settings: ModelSettings) -> tuple[Any, Any]:
        return load_empty(settings)

    def build(self, config: Config, loaded: LoadedModel, resources: ExitStack, display: Display) -> Workers:
        model, tokenizer, longest, device = loaded.model, loaded.tokenizer, loaded.longest, self.device()
        # Before the engines, so that each rank finds a GPU of its own.
        policy = build_distributed_policy(config, model, tokenizer, longest, loaded.save_dtype)
        resources.callback(policy.close)
        model.load_state_dict(policy.stored_buffers(), strict=False, assign=True)
        plan = replace(policy.planned(), time_share=takes_turns(config, device))
        critic = DistributedCritic(policy) if config.has_critic else None
        named = config.engine if self._inputs.engine is None else self._inputs.engine
        how = (tokenizer, device, loaded.dtype, loaded.context, display.note)
        engine = build_engine_pool(_with_cache(config, plan), named, model, policy.weights(), *how)
        resources.callback(engine.close)
        return Workers(engine, policy, critic, plan, policy.restart)


def _with_cache(config: Config, plan: MemoryPlan) -> Config:
    """The settings of engines that get the cache that is planned for them."""
    if plan.kv_bytes is None:
        return config
    sampling = config.sampling.model_copy(update={"kv_memory_gib": plan.kv_bytes / 2**30})
    return config.model_copy(update={"sampling": sampling})
