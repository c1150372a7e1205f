"""Builds the parts of a run from its settings: the only module that knows the concrete classes."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo_rl.base.format import counted
from dapo_rl.base.load import load_function, spec_of
from dapo_rl.cluster.build_engines import build_engine_pool, check_engines, takes_turns
from dapo_rl.cluster.build_policy import build_ranked_policy, check_ranks, ranks_device
from dapo_rl.cluster.policy import RankedCritic, RankedPolicy
from dapo_rl.cluster.session import ray_cluster
from dapo_rl.config import Config, ModelSettings, SourceSettings
from dapo_rl.data import (
    LazyStream,
    MixedStream,
    PromptSet,
    PromptStream,
    Stream,
    held_out_prompts,
    stream_of,
    training_prompts,
)
from dapo_rl.data.apart import check_apart, shared_prompts
from dapo_rl.data.sources import IN_MEMORY, as_sources, check_there
from dapo_rl.engines.build import build_engine, can_rest, close_engine, is_engine, vocabulary_of
from dapo_rl.engines.custom import CustomEngine
from dapo_rl.engines.protocol import Engine, SamplingParams
from dapo_rl.errors import UserError
from dapo_rl.memory.model_size import ModelSize
from dapo_rl.memory.one_gpu import MemoryPlan, PlanSettings, plan_memory
from dapo_rl.memory.sizes import RUNTIME, RunSizes, run_sizes
from dapo_rl.models.load import (
    check_context,
    check_tokenizer,
    check_vocabulary,
    compute_dtype,
    copy_in,
    describe_model,
    load_empty,
    load_model,
    load_tokenizer,
    make_savable,
    pad_id,
    pick_device,
    refuse_media_model,
    saved_dtype,
    slow_dtype,
    stored_dtype,
    to_float32,
)
from dapo_rl.models.lora import (
    add_lora,
    base_of,
    has_lora,
    is_adapted,
    lora_settings,
    merged_copy,
    peft_config_of,
    train_adapters,
)
from dapo_rl.models.recompute import can_recompute
from dapo_rl.models.values import value_model
from dapo_rl.models.weights import ModelWeights
from dapo_rl.objectives.advantages import Advantages
from dapo_rl.objectives.losses import TokenLosses
from dapo_rl.rewards import as_verifier, build_verifier
from dapo_rl.rewards.build import recorded_verifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rewards.saved_state import SavedRewardState
from dapo_rl.rewards.state import RewardState
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.runs.display import Display
from dapo_rl.runs.trackers import check_installed
from dapo_rl.train.checkpoint import Part
from dapo_rl.train.critic import HFCritic
from dapo_rl.train.disk import DiskNeed
from dapo_rl.train.own import build_advantages, build_losses
from dapo_rl.train.policy import HFPolicy
from dapo_rl.train.progress import Progress
from dapo_rl.train.random_state import RandomState


@dataclass(frozen=True, slots=True)
class Given:
    """What the caller passes in addition to the settings. The settings apply where a field is None."""

    model: Any = None
    processing_class: Any = None
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    engine: Any = None
    """An engine, or a class or function that is called like a custom engine in the settings."""
    reward_weights: Sequence[float] | None = None
    """One for each of several reward functions; None: all are 1."""
    peft_config: Any = None
    """peft's `LoraConfig`, instead of `model.lora`."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the arguments."""
    to_device: bool = False
    """Whether to move a loaded model to `model.device`, as TRL does. Otherwise it stays where it is."""

    @property
    def names_a_model(self) -> bool:
        """Whether there is a model to load, rather than a loaded one."""
        return self.model is None or isinstance(self.model, str | os.PathLike)


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run. No part refers to the run, so dropping the last reference frees all of them."""

    config: Config
    model: Any
    tokenizer: Any
    verifier: VerifierPool
    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    engine: Engine
    sampler: Sampler
    policy: HFPolicy | RankedPolicy
    critic: HFCritic | RankedCritic | None
    advantages: Advantages
    progress: Progress
    plan: MemoryPlan
    disk: DiskNeed
    parts: tuple[Part, ...]
    """The parts of a checkpoint, except the log."""
    description: str
    notes: tuple[str, ...]
    """Notes for the user, shown before the first step."""
    cluster: ExitStack = field(default_factory=ExitStack)
    """Ends the ranks and the connection to Ray."""

    @property
    def learners(self) -> tuple[Part, ...]:
        """The parts that change by updates alone."""
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    def close(self) -> None:
        """Stops the processes that the parts have started."""
        with self.cluster:
            try:
                close_engine(self.engine)
            finally:
                self.verifier.close()


def build_run(config: Config, given: Given, display: Display) -> Run:
    """Builds a run. If this raises, everything built so far is closed."""
    check_installed(config.log.to)
    _check_data(config, given)
    if on_ranks(config):
        check_ranks(config, loaded=not given.names_a_model)
    with ExitStack() as built:
        # The verifier forks its workers from this process, so it must come before anything that starts threads or
        # initialises a GPU. Its settings do not depend on `resolve`.
        verifier = built.enter_context(_verifier(config, given))
        cluster = built.enter_context(ExitStack())
        if on_ranks(config):
            cluster.enter_context(ray_cluster(config.cluster))
            check_engines(config.cluster, ranks_device(config))
        config = resolve(config, given)
        losses, advantages = build_losses(config.algo), build_advantages(config.algo)
        for key, source in _sources(config, given).items():
            check_there(source, key)  # a model may take minutes to load
        check_apart(*_sources(config, given).values())
        model, tokenizer = _model_and_tokenizer(config, given)
        config = _with_lora(config, given, model)
        came = stored_dtype(config.model.name) if given.names_a_model else model.dtype
        notes = [*given.notes, verifier.note, to_float32(model)]
        train_prompts, eval_prompts = _prompt_sets(config, given, tokenizer, verifier)
        notes.append(shared_prompts(train_prompts, eval_prompts, tuple(_sources(config, given).values())))
        longest = _longest(config, model, train_prompts, eval_prompts)
        device = _device(config, given) if on_ranks(config) else next(model.parameters()).device
        dtype, save_dtype = compute_dtype(config.model, device), saved_dtype(config.model, came)
        policy: HFPolicy | RankedPolicy
        critic: HFCritic | RankedCritic | None = None
        if on_ranks(config):  # before the engines, so that each rank finds a GPU of its own
            policy = build_ranked_policy(config, model, tokenizer, longest, save_dtype)
            cluster.callback(policy.close)
            plan = replace(policy.planned(), turns=takes_turns(config, device))
            critic = RankedCritic(policy) if config.has_critic else None
            named = config.engine if given.engine is None else given.engine
            how = (tokenizer, device, dtype, longest, display.note)
            engine: Engine = build_engine_pool(_with_cache(config, plan), named, model, policy.weights(), *how)
        else:
            plan = memory_plan(config, model, longest, can_rest(config.engine, device))
            values = _value_model(model) if config.has_critic else None
            engine = _engine(config, given, model, tokenizer, dtype, longest, plan)
        built.callback(close_engine, engine)
        stream = _stream(config, train_prompts, model, display)
        sampler = _sampler(config, stream, engine, verifier, display, vocabulary_of(model))
        if not on_ranks(config):
            policy = build_policy(model, tokenizer, config, longest, losses, save_dtype, plan)
            critic = (
                build_critic(values, tokenizer, config, longest, plan, policy.packed) if config.has_critic else None
            )
        notes += [
            slow_dtype(dtype, device),
            plan.note,
            policy.note,
            policy.save_note,
            _idle_engines(config),
            _noisy(config),
        ]
        progress = Progress()
        run = Run(
            config=config,
            model=model,
            tokenizer=tokenizer,
            verifier=verifier,
            train_prompts=train_prompts,
            eval_prompts=eval_prompts,
            engine=engine,
            sampler=sampler,
            policy=policy,
            critic=critic,
            advantages=advantages,
            progress=progress,
            plan=plan,
            disk=DiskNeed.of(config, model, save_dtype),
            parts=(
                policy,
                *([] if critic is None else [critic]),
                _stream_part(stream, sampler),
                sampler,
                progress,
                SavedRewardState(verifier, config.train.steps),
                RandomState(),
            ),
            description=describe_model(model, dtype, _where(config, device)),
            notes=tuple(note for note in notes if note),
            cluster=cluster,
        )
        built.pop_all()
        return run


def _with_cache(config: Config, plan: MemoryPlan) -> Config:
    """The settings of engines that get the cache that is planned for them."""
    if plan.kv_bytes is None:
        return config
    sampling = config.sampling.model_copy(update={"kv_memory_gib": plan.kv_bytes / 2**30})
    return config.model_copy(update={"sampling": sampling})


def _idle_engines(config: Config) -> str | None:
    """A note if engines that could sample during updates have little to do then."""
    cluster = config.cluster
    if cluster.backend is None or cluster.placement == "colocated":
        return None
    said = f"cluster.placement={cluster.placement}"
    if not config.during_updates:
        return f"{said}: nothing is sampled during updates, which needs surplus=carry, max_staleness=1"
    if not config.sampling.ahead:
        return f"{said}: engines have little to do during updates; sampling.ahead=1 draws a batch ahead"
    return None


def _noisy(config: Config) -> str | None:
    """A note if the update computes something else than what sampled."""
    lora = config.model.lora
    if lora is None or not lora.dropout:
        return None
    return f"model.lora.dropout={lora.dropout:g}: updates have dropout and sampling has none, so ratios are noisy"


def on_ranks(config: Config) -> bool:
    """Whether the policy is trained on ranks, rather than in this process, which then has no weights of it."""
    return config.cluster.backend is not None


def _where(config: Config, device: torch.device) -> str | None:
    return f"{counted(config.cluster.ranks, 'rank')} ({device.type})" if on_ranks(config) else None


def resolve(config: Config, given: Given) -> Config:
    """The settings as the run directory records them: with the names of what the caller passed, and with the actual
    dtype instead of `model.dtype: auto`, so that a run resumed on another machine keeps it."""
    changes: dict[str, dict[str, Any]] = {"model": {}, "reward": {}, "data": {}}
    name = given.model if given.names_a_model else getattr(given.model, "name_or_path", None)
    if name:
        changes["model"]["name"] = os.fspath(name)
    changes["model"]["dtype"] = str(compute_dtype(config.model, _device(config, given))).removeprefix("torch.")
    if given.reward_funcs is not None:
        changes["reward"]["verifier"] = recorded_verifier(given.reward_funcs, given.reward_weights)
    for key, source in (("train", given.train_dataset), ("eval", given.eval_dataset)):
        if source is not None:
            named = os.fspath(source) if isinstance(source, os.PathLike) else as_sources(source, f"{key}_dataset")
            changes["data"][key] = named if isinstance(named, str | SourceSettings | tuple) else IN_MEMORY
    sections = {section: getattr(config, section).model_copy(update=values) for section, values in changes.items()}
    engine = config.engine if given.engine is None else spec_of(given.engine)
    return config.model_copy(update={**sections, "engine": engine})


def _device(config: Config, given: Given) -> torch.device:
    if on_ranks(config):
        return ranks_device(config)
    if given.names_a_model or given.to_device:
        return pick_device(config.model.device)
    device: torch.device = next(given.model.parameters()).device
    return device


def build_policy(
    model: Any,
    tokenizer: Any,
    config: Config,
    longest: int = 0,
    losses: TokenLosses | None = None,
    save_dtype: torch.dtype | None = None,
    plan: MemoryPlan | None = None,
) -> HFPolicy:
    """The policy that a run trains, with its optimizer; `longest` is the longest sample, if known, and `save_dtype`
    the type of saved models."""
    plan = plan or MemoryPlan(recompute=config.train.gradient_checkpointing is True)
    budget = config.train.token_budget or plan.token_budget
    return HFPolicy(
        model,
        pad_id=pad_id(tokenizer),
        temperature=config.sampling.temperature,
        algo=config.algo,
        train=config.train.model_copy(update={"gradient_checkpointing": plan.recompute}),
        norm_length=config.norm_length,
        token_budget=budget or config.token_budget,
        fill_memory=budget is None,
        turns=plan.turns,
        longest=longest,
        dtype=compute_dtype(config.model, next(model.parameters()).device),
        reference=_reference(model) if config.algo.kl_coef > 0 else None,
        losses=losses,
        tokenizer=tokenizer,
        settings=config.model,
        save_dtype=save_dtype,
        seed=config.seed,
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
        turns=plan.turns,
        longest=longest,
        dtype=compute_dtype(config.model, next(model.parameters()).device),
    )


def _value_model(model: Any) -> Any:
    """The critic's model; one with adapters is merged with them."""
    return value_model(merged_copy(model) if has_lora(model) else model)


def memory_plan(config: Config, model: Any, longest: int, engine_rests: bool, *, has_engine: bool = True) -> MemoryPlan:
    """What stays in GPU memory; raises a UserError if the run cannot fit."""
    wanted = config.train.gradient_checkpointing
    sizes = _sizes_on_gpu(config, model, longest)
    if sizes is None:
        if config.train.memory == "turns":
            raise UserError("train.memory: turns needs a GPU and a known architecture; set train.memory=auto")
        return MemoryPlan(recompute=wanted is True)
    if not has_engine:
        sizes = sizes.without_engine()
    recompute = False if wanted == "auto" and not can_recompute(model) else wanted
    return plan_memory(sizes, PlanSettings(config.train.memory, recompute, engine_rests))


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


def _verifier(config: Config, given: Given) -> VerifierPool:
    functions = given.reward_funcs
    if functions is None:
        return VerifierPool(build_verifier(config.reward), config.reward)
    return VerifierPool(as_verifier(functions, config.reward, given.reward_weights), config.reward)


def _model_and_tokenizer(config: Config, given: Given) -> tuple[Any, Any]:
    if given.names_a_model:
        model, loaded = (load_empty if on_ranks(config) else load_model)(config.model)
        return model, given.processing_class or loaded
    model, tokenizer = base_of(given.model), given.processing_class
    refuse_media_model(model)
    device = _device(config, given)
    if next(model.parameters()).device.type != device.type:
        model.to(device)
    model.eval()  # with dropout the policy that samples would differ from the policy that is trained
    if tokenizer is None:
        if not getattr(model, "name_or_path", None):
            raise UserError("a loaded model needs its tokenizer: pass processing_class=tokenizer")
        tokenizer = load_tokenizer(model.name_or_path)
    check_tokenizer(tokenizer, config.model.name)
    make_savable(model)
    return model, tokenizer


def _check_data(config: Config, given: Given) -> None:
    """Raises UserError if a run of the caller's own model would fall back to the demo's data, or if it is to be
    evaluated on nothing."""
    own = given.model is not None or config.model.name != ModelSettings().name
    if own and given.train_dataset is None:
        config.check_data("train_dataset" if given.model is not None else f"model.name={config.model.name}")
    if config.eval.every is not None and _sources(config, given)["data.eval"] is None:
        raise UserError(
            "eval.every: there is nothing to evaluate on; set data.eval, give eval_dataset, or set eval.every=none"
        )


def _sources(config: Config, given: Given) -> dict[str, Any]:
    return {
        "data.train": config.data.train if given.train_dataset is None else given.train_dataset,
        "data.eval": config.data.eval if given.eval_dataset is None else given.eval_dataset,
    }


def _with_lora(config: Config, given: Given, model: Any) -> Config:
    """Sets `model.lora` as `peft_config` says, or as the adapters that the model already has. Unless `config` says
    otherwise, they are saved in peft's format, which TRL's users expect."""
    adapters, settings = peft_config_of(model), config.model.lora
    if adapters is not None and given.peft_config is not None:
        raise UserError("peft_config: the model already has LoRA adapters, which are trained; leave it out")
    chosen = given.peft_config if adapters is None else adapters
    if chosen is None:
        return config
    if settings is not None and settings.model_fields_set != {"save"}:
        raise UserError("model.lora: the adapters are given as peft's; of these settings, only model.lora.save applies")
    save = "adapter" if settings is None else settings.save
    lora = lora_settings(chosen, model).model_copy(update={"save": save})
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    config.check_conflicts()
    return config


def _prompt_sets(
    config: Config, given: Given, tokenizer: Any, verifier: VerifierPool
) -> tuple[PromptSet, PromptSet | None]:
    """The training prompts and the held-out prompts."""

    how = (tokenizer, config.data, verifier.needs_answer)
    sources = _sources(config, given)
    train, source = training_prompts(sources["data.train"], *how), sources["data.eval"]
    held_out = None if source is None else held_out_prompts(source, *how, config.eval.prompts)
    verifier.check([*train.prompts, *(held_out.prompts if held_out else [])])
    return train, held_out


def _longest(config: Config, model: Any, *prompt_sets: PromptSet | None) -> int:
    """The tokens of the longest possible sample; raises if the model does not support it, or a prompt's tokens."""
    prompts = [prompt for prompt_set in prompt_sets if prompt_set for prompt in prompt_set.prompts]
    check_vocabulary(model, max(int(prompt.token_ids.max()) for prompt in prompts))
    longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
    if any(prompt_set.is_stream for prompt_set in prompt_sets if prompt_set):  # most of its prompts are not read yet
        longest_prompt = config.data.max_prompt_tokens
    check_context(model, longest_prompt, config.sampling.max_new_tokens)
    return longest_prompt + config.sampling.max_new_tokens


def _engine(
    config: Config,
    given: Given,
    model: Any,
    tokenizer: Any,
    dtype: torch.dtype,
    longest: int,
    plan: MemoryPlan,
) -> Engine:
    """Builds the engine. With LoRA this also adds the adapters to the model."""
    sampled = model
    if has_lora(model):
        sampled = merged_copy(model)
        train_adapters(model)
    elif config.model.lora is not None:
        # The engine samples from a plain model; it receives weights with the adapters merged in.
        narrow = config.engine == "native" and next(model.parameters()).is_cuda
        sampled = copy_in(model, dtype if narrow else torch.float32)
        add_lora(model, config.model.lora, config.seed)
    if given.engine is not None and is_engine(given.engine):
        engine = CustomEngine(given.engine, config.engine, vocabulary_of(model))
        engine.receive(0, ModelWeights(model))  # it may hold other weights
        return engine
    named = config.engine if given.engine is None else given.engine
    copies = sampled is model
    memory = (plan.kv_bytes, plan.turns)
    options = config.engine_options
    return build_engine(named, sampled, tokenizer, config.sampling, dtype, longest, copies, *memory, options)


def _stream(config: Config, prompts: PromptSet, model: Any, display: Display) -> Stream:
    stream = stream_of(prompts, config.seed)
    if prompts.is_stream and config.sampling.retire:
        raise UserError(
            "sampling.retire: a stream without a length has no epochs to leave a prompt out of; set it to 0, or give "
            "data.train as a list"
        )
    if not isinstance(stream, PromptStream):
        stream.watch(lambda prompt: check_vocabulary(model, int(prompt.token_ids.max())), display.note)
    return stream


@dataclass(frozen=True, slots=True)
class _LazyPart:
    """Saves a stream with the prompts that the sampler needs again: those of unfinished groups."""

    stream: LazyStream | MixedStream
    sampler: Sampler

    def save(self, directory: Path) -> None:
        self.stream.save(directory, [prompt.id for prompt in self.sampler.unfinished])

    def load(self, directory: Path) -> None:
        self.stream.load(directory)


def _stream_part(stream: Stream, sampler: Sampler) -> Part:
    return stream if isinstance(stream, PromptStream) else _LazyPart(stream, sampler)


def _sampler(
    config: Config,
    stream: Stream,
    engine: Engine,
    verifier: VerifierPool,
    display: Display,
    vocabulary: int,
) -> Sampler:
    return Sampler(
        stream,
        engine,
        verifier,
        SamplingParams.of(config.sampling),
        config.sampling,
        cap=config.sampling_cap,
        seed=config.seed,
        max_error_share=config.reward.max_error_share,
        keep=None if config.sampling.filter is None else load_function(config.sampling.filter),
        masking=config.masking,
        on_progress=partial(display.phase, "sampling"),
        on_step=lambda step: tell_progress(verifier, config, step, stream),
        vocabulary=vocabulary,
        during_updates=config.during_updates,
    )


def tell_progress(verifier: VerifierPool, config: Config, step: int, stream: Stream | None = None) -> None:
    """Tells the reward functions how many steps are complete; an evaluation, which has no stream, keeps the epoch."""
    epoch = verifier.state.epoch if stream is None else stream.epochs_drawn
    verifier.state = RewardState(step, config.train.steps, epoch)


def _reference(model: Any) -> Any:
    """A frozen copy of the model. A model whose adapters are new contains its own reference."""
    if has_lora(model):
        return merged_copy(model) if is_adapted(model) else model
    return copy.deepcopy(model).requires_grad_(False)
