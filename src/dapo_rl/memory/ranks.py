"""The memory plan of ranks on GPUs, made on each of them before the model is loaded.

A rank holds its shards of the weights, gradients and moments, on the GPU or on the host. While it updates, it also has
the gathered weights of two layers and their gradients, and the activations of its micro-batch. Engines on the same GPU
keep what `cluster.placement` gives them. The first plan that fits is taken: without recomputed layers, with them, and
then, unless the settings say how many tokens a micro-batch has, with fewer tokens; where there is room, with more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dapo_rl.base.format import counted, gib
from dapo_rl.base.host_memory import host_memory
from dapo_rl.config import Config
from dapo_rl.engine_specs import EngineSpec, engine_spec
from dapo_rl.errors import UserError
from dapo_rl.memory.model_size import ModelSize
from dapo_rl.memory.one_gpu import MOST_TOKENS, NOTE, MemoryPlan
from dapo_rl.memory.report import Memory, MemoryPart, MemoryReport
from dapo_rl.memory.sizes import RUNTIME, RunSizes, run_sizes, trained_parameters, update_tokens
from dapo_rl.models.recompute import can_recompute, layers_of

SHARED_SHARE = 0.4
"""The share of a GPU's memory for all engines that work on it at the same time as a rank."""
FILLED = 0.75
"""The share of a GPU up to which micro-batches are made larger: a sharded layer then costs less for each token."""
MOST_RANKS = 1024
FEW_SEQUENCES = 8
"""Samples of the longest length in the smallest cache that is suggested."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Plans the memory of ranks. It is sent to every rank, which adds the size of its GPU."""

    config: Config
    size: ModelSize
    layer: int
    """Parameters of the largest layer."""
    root: int
    """Parameters that belong to no layer: embeddings, the last norm and the output layer."""
    bfloat16: bool
    longest: int
    can_recompute: bool = True

    @classmethod
    def of(cls, config: Config, model: Any, bfloat16: bool, longest: int) -> RankMemory | None:
        """`model` is a plain model, which needs no weights. None for an architecture with an unusual config."""
        layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
        try:
            size = ModelSize.of(model)
        except (AttributeError, TypeError, ZeroDivisionError):
            return None
        root = size.parameters - sum(layers)
        return cls(config, size, max(layers, default=0), root, bfloat16, longest, can_recompute(model))

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch of a rank: the budget, its share of an update, or a single sample."""
        return max(min(self.config.token_budget, self._share), self.longest)

    @property
    def _share(self) -> int:
        """Tokens of a rank in an update. Shares differ by a sample at most."""
        return update_tokens(self.config) // self.config.cluster.ranks + self.longest

    def plan(self, gpu: int, host: int) -> MemoryPlan:
        """The first plan that fits on a GPU of so many bytes, and into so many bytes of the host for each rank; raises
        a UserError with the sums if there is none."""
        plan = self.find(gpu, host)
        if plan is None:
            raise UserError(f"cluster.ranks: {self._refusal(gpu, host)}")
        return plan

    def find(self, gpu: int, host: int) -> MemoryPlan | None:
        sizes = self.sizes(gpu)
        if self._on_host() > host or self.sampling(sizes, self._kv_least(sizes)) > sizes.usable:
            return None
        for recompute in self.choices:
            if self.updating(sizes, self.tokens, recompute) <= sizes.usable:
                more = min(self._tokens_in(sizes, FILLED * sizes.usable, recompute), self._share, MOST_TOKENS)
                if self.config.train.token_budget is not None or more <= self.tokens:
                    return self._planned(sizes, self.tokens, recompute)
                return replace(self._planned(sizes, more, recompute), token_budget=more)
        if self.config.train.token_budget is None:
            recompute = self.choices[-1]
            tokens = self._tokens_in(sizes, sizes.usable, recompute)
            if tokens >= self.longest:
                return replace(self._planned(sizes, tokens, recompute), token_budget=tokens)
        return None

    def _tokens_in(self, sizes: RunSizes, nbytes: float, recompute: bool) -> int:
        """The most tokens of a micro-batch with which updates take so much of a GPU."""
        left = int(nbytes) - self.updating(sizes, 0, recompute) + sizes.working(0, recompute)
        return sizes.tokens_in(left, recompute)

    def sizes(self, gpu: int) -> RunSizes:
        """The sizes of a rank, and of each engine, on a GPU of so many bytes."""
        cluster, cut = self.config.cluster, replace(self.shards(self._whole(gpu)), graphs=0)  # in the engine's process
        if cluster.offload:
            cut = cut.without_state()
        if not self._spec.casts_weights:  # in an actor, it has weights of its own
            cut = replace(cut, engine=4 * self.size.parameters)
        return cut.without_engine() if cluster.placement == "separate" else cut

    def shards(self, whole: RunSizes) -> RunSizes:
        """The shards of one rank, and the parameters and gradients that FSDP gathers for a layer at a time."""
        lora, width = self.config.model.lora is not None, 2 if self.bfloat16 else 4
        # FSDP prefetches the next layer, so two layers are whole at a time. Beside them are the gradients of one in the
        # same type, and in float32 those that are sent, of two layers.
        of_layer = trained_parameters(self.config, self.size) // self.size.layers if lora else self.layer
        layers = 2 * width * self.layer + (width + 8) * of_layer
        # What is outside layers stays gathered. In the backward pass there are the logits of a chunk and the gradient
        # of the output layer, then that gradient and layers, and at the end the gradients of all that is outside.
        root, of_root, of_head = width * self.root, 0 if lora else self.root, 0 if lora else self.size.head
        logits = whole.head - 2 * self.size.head * self.bfloat16
        return replace(
            whole.divided(self.config.cluster.ranks),
            casts=layers,
            layer_casts=layers + root + width * of_head,
            head=root + max(logits, (width + 4) * of_root),
        )

    def updating(self, sizes: RunSizes, tokens: int, recompute: bool) -> int:
        return sizes.updating(tokens, recompute) + self.engines(sizes)

    def sampling(self, sizes: RunSizes, kv: int) -> int:
        """The bytes on a GPU while an engine that takes turns with the rank samples; 0 if there is none."""
        return sizes.sampling(kv) + self._resident if self._rests else 0

    def engines(self, sizes: RunSizes) -> int:
        cluster, number = self.config.cluster, self.config.cluster.engines_per_gpu
        if cluster.placement == "separate":
            return 0
        if self._rests:
            return self._resident
        if cluster.placement == "shared" and self._spec.gpu_share is not None:
            return int(SHARED_SHARE * sizes.gpu)
        each = self._resident + sizes.engine + sizes.prefill
        if sizes.kv_setting is not None:
            return number * (each + sizes.kv_setting)
        if cluster.placement == "colocated":
            return each + sizes.kv_least
        # They share what the weights leave, before there are moments.
        left = sizes.gpu - RUNTIME - sizes.weights - sizes.reference - number * each
        return number * each + max(int(SHARED_SHARE * left), number * sizes.kv_least)

    @property
    def _spec(self) -> EngineSpec:
        return engine_spec(self.config.engine)

    @property
    def _rests(self) -> bool:
        return self.config.cluster.placement == "colocated" and self._spec.releases_memory

    @property
    def _resident(self) -> int:
        """The bytes that an engine keeps when it has released its memory."""
        return RUNTIME + self._whole(0).graphs

    @property
    def choices(self) -> tuple[bool, ...]:
        wanted = self.config.train.gradient_checkpointing
        if wanted == "auto":
            return (False, True) if self.can_recompute else (False,)
        return (wanted,)

    def _whole(self, gpu: int) -> RunSizes:
        return run_sizes(self.config, self.size, gpu, bfloat16=self.bfloat16, longest=self.longest)

    def _on_host(self) -> int:
        """The bytes of a rank's offloaded shards."""
        held = self._whole(0).divided(self.config.cluster.ranks).state
        return sum(held.values()) if self.config.cluster.offload else 0

    def _kv_least(self, sizes: RunSizes) -> int:
        return sizes.kv_least if self._spec.paged_cache else 0

    def _planned(self, sizes: RunSizes, tokens: int, recompute: bool) -> MemoryPlan:
        """The plan with micro-batches of so many tokens. An engine that takes turns gets the cache that it would take
        by itself, or what is left."""
        kv = None
        if self._rests and self._spec.paged_cache and sizes.kv_setting is None:
            left = sizes.usable - self.sampling(sizes, 0)
            kv = left if left < sizes.kv_default else None
        taken = gib(self.updating(sizes, tokens, recompute))
        line = f"{NOTE}a GPU needs about {taken} of its usable {gib(sizes.usable)} during updates"
        if recompute and self.config.train.gradient_checkpointing == "auto":
            whole = gib(self.updating(sizes, self.tokens, recompute=False))
            line += f", with layers that are recomputed in the backward pass; without, {whole}"
        if tokens < self.tokens:
            line += f"; micro-batches have {tokens:,} tokens instead of {self.tokens:,}"
        if kv is not None:
            line += f"; the KV cache is limited to {gib(kv)}"
        return MemoryPlan(self._rests, recompute, kv, note=line)

    def _refusal(self, gpu: int, host: int) -> str:
        sizes, least = self.sizes(gpu), self.tokens if self.config.train.token_budget else self.longest
        if self._on_host() > host:
            needs = f"the shards of a rank need {gib(self._on_host())} of the host, which has {gib(host)} for each"
            return f"{needs}; {self._remedy(gpu, host)}"
        recompute, kv = self.choices[-1], self._kv_least(sizes)
        updating, sampling = self.updating(sizes, least, recompute), self.sampling(sizes, kv)
        if updating >= sampling:
            working = sizes.working(least, recompute)
            phase, parts = "updating", sizes.state | {f"{least:,} tokens": working, "engines": self.engines(sizes)}
        else:
            phase, parts = "sampling", sizes.state | {"gradients": 0, "engine": sizes.engine + sizes.prefill + kv}
        listed = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts.items() if nbytes)
        needs = f"each GPU needs at least {gib(max(updating, sampling))} while {phase} ({listed})"
        return f"{needs}, and has {gib(sizes.usable)} to use; {self._remedy(gpu, host)}"

    def _remedy(self, gpu: int, host: int) -> str:
        fitting = [
            words.format(tokens=plan.token_budget or other.tokens)
            for words, other in self._others()
            if (plan := other.find(gpu, host))
        ]
        ranks = self.config.cluster.ranks
        while (ranks := 2 * ranks) <= MOST_RANKS:
            if self._with("cluster", ranks=ranks).find(gpu, host):
                fitting.append(f"cluster.ranks={ranks}")
                break
        if fitting:
            return f"with {' or '.join(fitting)} it fits"
        lora = "model.lora, " if self.config.model.lora is None else ""
        return f"use larger GPUs, a smaller model, {lora}or fewer sampling.max_new_tokens"

    def _others(self) -> Iterator[tuple[str, RankMemory]]:
        config = self.config
        if config.train.gradient_checkpointing is False:
            recomputing = self._with("train", gradient_checkpointing="auto")
            yield "train.gradient_checkpointing=true", recomputing
        if config.train.token_budget is not None:
            yield "train.token_budget={tokens}", self._with("train", token_budget=None)
        if self._spec.paged_cache and config.cluster.placement != "separate":
            sizes = self._whole(0)
            few = round(FEW_SEQUENCES * replace(sizes, kv_setting=None).kv_least / 2**30 + 0.05, 1)
            if config.sampling.kv_memory_gib != few:
                yield f"sampling.kv_memory_gib={few}", self._with("sampling", kv_memory_gib=few)
        if config.train.optimizer == "adamw":
            yield "train.optimizer=adamw_8bit", self._with("train", optimizer="adamw_8bit")
        if not config.cluster.offload:
            yield "cluster.offload=true", self._with("cluster", offload=True)
        if config.cluster.placement != "separate":
            yield "cluster.placement=separate", self._with("cluster", placement="separate")

    def _with(self, section: str, **changes: Any) -> RankMemory:
        changed = getattr(self.config, section).model_copy(update=changes)
        return replace(self, config=self.config.model_copy(update={section: changed}))


def ranks_report(config: Config, size: ModelSize, machine: Memory, bfloat16: bool) -> MemoryReport:
    memory = rank_memory(config, size, bfloat16)
    host = host_memory() // config.cluster.ranks if machine.here else sys.maxsize
    sizes = memory.sizes(machine.bytes)
    where = f"on {counted(config.cluster.ranks, 'rank')} ({machine.name})"
    least = memory.updating(sizes, memory.longest, recompute=memory.choices[-1])
    try:
        plan = memory.plan(machine.bytes, host)
    except UserError as error:
        line = f"does not fit {where}: {str(error).removeprefix('cluster.ranks: ')}"
        return MemoryReport(machine, (), least, line, False)
    tokens, optimizer = plan.token_budget or memory.tokens, config.train.optimizer
    shards = "float32" if config.cluster.ranks == 1 else f"float32, a shard of {config.cluster.ranks}"
    parts = (
        MemoryPart("weights", sizes.weights, shards),
        MemoryPart("gradients", sizes.gradients, shards),
        MemoryPart("optimizer", sizes.moments, optimizer),
        MemoryPart("reference model", sizes.reference, "float32, for algo.kl_coef or as teacher"),
        MemoryPart("critic", sizes.critic, f"weights, gradients and {optimizer}"),
        MemoryPart("update", sizes.working(tokens, plan.recompute), f"{tokens:,} tokens, gathered layers, logits"),
        MemoryPart("engines", memory.engines(sizes), f"during updates, {config.cluster.placement}"),
        MemoryPart("runtime", RUNTIME, "CUDA and its libraries"),
    )
    verdict = f"fits {where}: {plan.note.removeprefix(NOTE) if plan.note else ''}"
    return MemoryReport(machine, tuple(part for part in parts if part.bytes), least, verdict, True)


def rank_memory(config: Config, size: ModelSize, bfloat16: bool, ranks: int | None = None) -> RankMemory:
    """Plans for a model of this size, as if all its layers were equal. `ranks` overrides the setting."""
    if ranks is not None:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ranks": ranks})})
    hidden = size.hidden
    layer = 2 * hidden * (size.queries + size.keys) + 3 * hidden * size.inner
    untied = size.parameters - size.layers * layer > 1.5 * size.head
    root = size.head * (2 if untied else 1)
    return RankMemory(config, size, (size.parameters - root) // size.layers, root, bfloat16, config.longest_sample)
