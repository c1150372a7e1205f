"""How a run is spread over GPUs, and the memory that each of them needs.

The trainer's weights, gradients and moments are divided over its GPUs (FSDP), two layers are gathered at a time, and
every rank has the activations of its own micro-batch. An engine's weights and pages are divided over its
`tensor_parallel` GPUs. The sums are those of `dapo check`, on one GPU and on ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from dapo_rl.base.format import gib
from dapo_rl.config import Config
from dapo_rl.lab.plan.rates import GPUS_PER_NODE, Gpu
from dapo_rl.memory.check import Need
from dapo_rl.memory.model_size import ModelSize
from dapo_rl.memory.one_gpu import (
    MemoryPlan,
    PlanSettings,
    find_plan,
    least_bytes,
    micro_batch_tokens,
    recomputes,
    remedy,
)
from dapo_rl.memory.ranks import rank_memory
from dapo_rl.memory.report import MemoryPart
from dapo_rl.memory.sizes import RUNTIME, RunSizes

MOST_GPUS = 8192
ROOMY = 8
"""Samples of the longest length that an engine should hold: with fewer, it decodes few samples at a time."""


@dataclass(frozen=True, slots=True)
class Layout:
    gpus: int
    tensor_parallel: int = 1
    rollout_gpus: int | None = None
    """GPUs that only sample; None: all GPUs sample and update in turns."""

    @property
    def trainers(self) -> int:
        return self.gpus - (self.rollout_gpus or 0)

    @property
    def engines(self) -> int:
        return (self.rollout_gpus or self.gpus) // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class GpuMemory:
    config: Config
    size: ModelSize
    gpu: Gpu
    layout: Layout

    @property
    def sizes(self) -> RunSizes:
        """The sizes of the parts of a run on each GPU."""
        need, n, tp = self.need, self.layout.trainers, self.layout.tensor_parallel
        whole = need.sizes
        return replace(
            whole if n == 1 else rank_memory(need.config, self.size, need.in_bfloat16, n).shards(whole),
            engine=whole.engine // tp,
            prefill=whole.prefill // tp,
            kv_token=whole.kv_token // tp,
        )

    @property
    def need(self) -> Need:
        """The same on one GPU. The engine's weights and pages are counted one by one, whatever the engine."""
        native = self.config.model_copy(update={"engine": "native"})
        return Need(native, self.size, self.gpu.memory)

    @property
    def plan(self) -> MemoryPlan | None:
        """The memory plan of the trainer's GPUs; None if it does not fit."""
        return find_plan(self._trainer_sizes, self._settings)

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.pages >= self.sizes.longest and self._updating <= self.sizes.usable

    @property
    def recompute(self) -> bool:
        return recomputes(self.config, self.plan)

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch of one rank: as many as fit, unless the recipe sets their number."""
        tokens = micro_batch_tokens(self.config, self.plan)
        if self.plan is None or self.config.train.token_budget is not None:
            return tokens
        return min(tokens, max(self._most_tokens, self.sizes.longest))

    @property
    def pages(self) -> int:
        return self._kv_bytes // self.sizes.kv_token

    def updating(self) -> tuple[MemoryPart, ...]:
        return tuple(MemoryPart(name, nbytes, about) for name, nbytes, _, about in self._parts() if nbytes > 0)

    def sampling(self) -> tuple[MemoryPart, ...]:
        """What is on an engine's GPU while it samples."""
        return tuple(MemoryPart(name, nbytes, about) for name, _, nbytes, about in self._parts() if nbytes > 0)

    def _parts(self) -> Iterator[tuple[str, int, int, str]]:
        """Each part's name, its bytes on a trainer's GPU and on an engine's, and a remark."""
        sizes, tokens, recompute, optimizer = self.sizes, self.token_budget, self.recompute, self.config.train.optimizer
        n, tp = self.layout.trainers, self.layout.tensor_parallel
        shard, part = f", 1/{n}" if n > 1 else "", f", 1/{tp}" if tp > 1 else ""
        same, keeps = self.layout.rollout_gpus is None, self._keeps
        for name, nbytes, about in (
            ("weights", sizes.weights, f"{self.size.parameters / 1e9:,.1f} B parameters, float32{shard}"),
            ("optimizer", sizes.moments, f"{optimizer}{shard}"),
            ("reference model", sizes.reference, f"float32{shard}, for algo.kl_coef or as teacher"),
            ("critic", sizes.critic, f"weights, gradients and optimizer{shard}"),
        ):
            yield name, nbytes, nbytes * same, about
        activations = tokens * (sizes.recomputed_token if recompute else sizes.token)
        yield "gradients", sizes.gradients, sizes.gradients * keeps, "float32"
        yield "activations", activations, 0, f"{tokens:,} tokens{' with recomputed layers' * recompute}"
        yield "update", sizes.working(tokens, recompute) - activations, 0, "copies of weights, logits"
        yield "engine's weights", sizes.engine * keeps, sizes.engine, f"bfloat16{part}"
        yield "KV cache", self._kv_bytes * keeps, self._kv_bytes, f"pages for {max(self.pages, 0):,} tokens"
        yield "prefill", 0, sizes.prefill, "activations of prompts"
        yield "graphs", sizes.graphs * same, sizes.graphs, "of decoding steps"
        yield "runtime", RUNTIME, RUNTIME, "CUDA and its libraries"

    def remedy(self) -> str:
        """What does not fit, and which setting mends it."""
        usable, sizes = self.sizes.usable, self._trainer_sizes
        if self.plan is None:
            lacking = f"a GPU needs at least {gib(least_bytes(sizes, self._settings))}, and can use {gib(usable)}"
        elif self._updating > usable:
            lacking = (
                f"a GPU needs {gib(self._updating)} with micro-batches of {self.token_budget:,} tokens, and can use"
            )
            return f"{lacking} {gib(usable)}; with train.token_budget={self._most_tokens} it fits"
        else:
            held, wanted = max(self.pages, 0), self.sizes.longest
            lacking = f"an engine's pages hold {held:,} tokens, and the longest sample may have {wanted:,}"
        tp, rollout = self.layout.tensor_parallel, self.layout.rollout_gpus or 0
        for wider in (2 * tp, 4 * tp, 8 * tp):
            whole = wider <= GPUS_PER_NODE and not self.layout.gpus % wider and not rollout % wider
            if whole and self._with(tensor_parallel=wider).fits:
                return f"{lacking}; with --tensor-parallel {wider} it fits"
        own = remedy(sizes, self._settings)
        if self.plan is None and own.startswith("with "):
            return f"{lacking}; {own}"
        gpus = 2 * self.layout.gpus
        while gpus <= MOST_GPUS:
            widest = gcd(GPUS_PER_NODE, gpus, rollout)
            if self._with(gpus=gpus, tensor_parallel=widest).fits:
                return f"{lacking}; with --gpus {gpus} --tensor-parallel {widest} it fits"
            gpus *= 2
        return f"{lacking}; {own if self.plan is None else 'use a larger GPU, or fewer sampling.max_new_tokens'}"

    def _with(self, **changes: int) -> GpuMemory:
        return replace(self, layout=replace(self.layout, **changes))

    @property
    def _settings(self) -> PlanSettings:
        settings = self.need.plan_settings
        return replace(settings, memory="keep") if self.layout.rollout_gpus else settings

    @property
    def _trainer_sizes(self) -> RunSizes:
        return self.sizes.without_engine() if self.layout.rollout_gpus else self.sizes

    @property
    def _resident(self) -> int:
        """Bytes on a trainer's GPU during an update, without its working memory."""
        sizes = self._trainer_sizes
        state = sizes.updating(0, self.recompute) - sizes.working(0, self.recompute)
        return state + (sizes.engine + self._kv_bytes) * self._keeps

    @property
    def _updating(self) -> int:
        return self._resident + self._trainer_sizes.working(self.token_budget, self.recompute)

    @property
    def _most_tokens(self) -> int:
        """Tokens of the largest micro-batch that fits."""
        return self._trainer_sizes.tokens_in(self.sizes.usable - self._resident, self.recompute)

    @property
    def _keeps(self) -> bool:
        """Whether engine and trainer are on a GPU at the same time."""
        return self.layout.rollout_gpus is None and self.plan is not None and not self.plan.time_share

    @property
    def _kv_bytes(self) -> int:
        sizes = self.sizes
        if self.layout.rollout_gpus:
            alone = sizes.without_state()
            return min(alone.kv_most, alone.usable - alone.sampling(0))
        if self.plan is None:
            return sizes.usable - sizes.sampling(0)
        return sizes.kv_default if self.plan.kv_bytes is None else self.plan.kv_bytes


def choose_layout(config: Config, size: ModelSize, gpu: Gpu, layout: Layout, tensor_parallel: int | None) -> Layout:
    """The layout with this number of GPUs per engine. By default the smallest with room for several of the longest
    samples, or else for one; the largest if none fits."""
    if tensor_parallel is not None:
        return replace(layout, tensor_parallel=tensor_parallel)
    sampling = layout.rollout_gpus or layout.gpus
    tried = [n for n in (1, 2, 4, 8) if sampling % n == 0]
    memory = {n: GpuMemory(config, size, gpu, replace(layout, tensor_parallel=n)) for n in tried}
    fitting = [n for n in tried if memory[n].fits]
    roomy = [n for n in fitting if memory[n].pages >= ROOMY * config.longest_sample]
    return replace(layout, tensor_parallel=(roomy or fitting or tried[-1:])[0])
