"""Estimates the memory of a run, and whether it fits into a GPU or the RAM of this machine.

The sizes of its parts are in `sizes.py`. On a GPU, `train.memory` decides whether all of them are there at once, or
whether the engine's weights and the KV cache are freed during updates: the plan is the one that a run makes
(`one_gpu.py`).

The activations are an estimate from the operations of a Llama: other architectures differ. On an H200 it is within
10 % of the measured peak for Qwen2.5-0.5B and one sample of 20,480 tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from dapo_rl.base.format import gib
from dapo_rl.base.host_memory import host_memory
from dapo_rl.config import Config
from dapo_rl.engine_specs import engine_spec
from dapo_rl.engines.native.kv_cache import KVBudget
from dapo_rl.errors import UserError
from dapo_rl.memory.model_size import ModelSize, size_of
from dapo_rl.memory.one_gpu import (
    MemoryPlan,
    PlanSettings,
    find_plan,
    least_bytes,
    micro_batch_tokens,
    recomputes,
    remedy,
)
from dapo_rl.memory.ranks import ranks_report
from dapo_rl.memory.report import GIB, Memory, MemoryPart, MemoryReport
from dapo_rl.memory.sizes import RUNTIME, USABLE, run_sizes, update_tokens
from dapo_rl.models.chunked_lm_head import CHUNK_ELEMENTS
from dapo_rl.models.load import compute_dtype

GPUS = {
    **{"t4": 15.0, "l4": 22.5, "a10": 22.5, "a10g": 22.5, "rtx3090": 24.0, "rtx4090": 24.0, "rtx5090": 32.0},
    **{"v100": 32.0, "a40": 45.0, "l40s": 45.0, "a6000": 48.0, "a100": 80.0, "a800": 80.0, "h100": 80.0, "h800": 80.0},
    **{"gh200": 96.0, "h200": 140.0, "b200": 180.0},
}
"""GiB of common GPUs."""
_LIKE_A_NAME = 1000
"""GiB; no GPU has as many."""

_ANOTHER = "--gpu h100-80g estimates it for a GPU of another machine"


def find_memory(config: Config, gpu: str | None = None) -> Memory:
    if gpu is not None:
        name = gpu if re.search("[a-z][a-z]|[a-z][0-9]", gpu.lower()) else "a GPU"
        return Memory(name, "cuda", int(_gibibytes(gpu) * GIB), here=False)
    if config.model.device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Memory(properties.name, "cuda", int(properties.total_memory))
    return Memory("CPU", "cpu", host_memory())


def _gibibytes(gpu: str) -> float:
    name = gpu.strip().lower()
    if (listed := GPUS.get(re.sub("[- ]", "", name))) is not None:
        return listed
    number = re.fullmatch(r"((?:[a-z0-9]+[- ])*)(\d{1,5}(?:\.\d{1,5})?) ?(g|gb|gib)?", name)
    # A large number after a name is a part of it, as in `rtx 6000`, unless it has a unit.
    if number and float(number[2]) > 0 and (number[3] or not number[1] or float(number[2]) < _LIKE_A_NAME):
        return float(number[2])
    raise UserError(f"--gpu: {gpu}: give its memory in GiB (24, h100-80g) or one of {', '.join(GPUS)}")


def memory_report(config: Config, machine: Memory) -> MemoryReport:
    if machine.kind == "cpu" and config.model.device == "cuda":
        line = f"cannot run here: model.device is cuda, and there is no CUDA GPU; {_ANOTHER}"
        return MemoryReport(machine, (), 0, line, False)
    try:
        size = size_of(config.model.name)
        need = Need(config, size, machine)  # the size of a teacher may be unknown too
    except UserError as error:
        line = str(error).removeprefix("model.name: ")
        return MemoryReport(machine, (), 0, f"memory not estimated: {line}", None)
    if config.cluster.backend is not None and need.on_gpu:
        return ranks_report(config, size, machine, need.in_bfloat16)
    fits = need.fits and need.cache_fits
    report = MemoryReport(machine, need.parts(), need.least(), "", fits)
    return replace(report, verdict=_verdict(report, need))


class Need:
    """The memory of a recipe with a model of this size, in one process."""

    def __init__(self, config: Config, size: ModelSize, machine: Memory) -> None:
        self.config, self.size, self.machine = config, size, machine
        self.spec, self.on_gpu = engine_spec(config.engine), machine.kind == "cuda"
        self.in_bfloat16 = config.model.dtype != "float32"
        if config.model.dtype == "auto" and machine.here:
            self.in_bfloat16 = compute_dtype(config.model, torch.device(machine.kind)) == torch.bfloat16
        self.sizes = run_sizes(config, size, machine.bytes, bfloat16=self.in_bfloat16, on_cpu=not self.on_gpu)
        releases = self.spec.releases_memory_in_process
        self.plan_settings = PlanSettings(config.train.memory, config.train.gradient_checkpointing, releases)
        self.plan = find_plan(self.sizes, self.plan_settings) if self.on_gpu else MemoryPlan()
        """The plan of a run on a GPU; on a CPU everything stays. None if the run does not fit on the GPU."""
        self.recompute = recomputes(config, self.plan)
        self.token_bytes = self.sizes.recomputed_token if self.recompute else self.sizes.token
        """Activations per token of a micro-batch that are kept until the backward pass."""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.least() <= USABLE * self.machine.bytes

    @property
    def budget(self) -> KVBudget:
        sizes, setting = self.sizes, self.config.sampling.kv_memory_gib
        allowed = max(sizes.gpu - RUNTIME - sizes.weights - sizes.engine, 0) // 3 if self.on_gpu else sizes.gpu // 4
        if setting is not None:
            allowed = int(setting * GIB)
        device = torch.device(self.machine.kind)
        return KVBudget(allowed, sizes.kv_token, sizes.sequences, device, sizes.kept_token)

    @property
    def cache_fits(self) -> bool:
        """Whether the cache holds one sequence of the longest length; otherwise the native engine refuses to start."""
        return not self.spec.paged_cache or self.budget.slots(self.budget.capacity(self.config.longest_sample)) >= 1

    def parts(self, tokens: int | None = None, sequences: int | None = None) -> tuple[MemoryPart, ...]:
        """The parts with micro-batches of so many tokens, and so many sequences in the KV cache. If sampling and
        updating take turns, those of an update."""
        sizes, optimizer = self.sizes, self.config.train.optimizer
        tokens = tokens or micro_batch_tokens(self.config, self.plan)
        if not self.on_gpu:  # a small batch has fewer logits than a chunk
            of_chunk = sizes.head // CHUNK_ELEMENTS["cpu"]
            sizes = replace(sizes, head=min(sizes.head, of_chunk * tokens * self.size.vocabulary))
        activations = tokens * self.token_bytes
        update = "a layer" if self.recompute and not self.on_gpu else "copies of weights, a chunk of logits"
        reference = sizes.reference
        if self.plan and self.plan.time_share:
            reference -= sizes.teacher_or_gradients
        parts = (
            MemoryPart("weights", sizes.weights, f"{self.size.parameters / 1e6:,.1f} M parameters, float32"),
            MemoryPart("gradients", sizes.gradients, "float32"),
            MemoryPart("optimizer", sizes.moments, optimizer),
            MemoryPart("engine's weights", sizes.engine, self._engine),
            MemoryPart("reference model", reference, "float32, for algo.kl_coef or as teacher"),
            MemoryPart("critic", sizes.critic, f"weights, gradients and {optimizer}"),
            MemoryPart("reward model", sizes.reward, "for reward.verifier"),
            MemoryPart("activations", activations, f"{tokens:,} tokens of {gib(self.token_bytes)}"),
            MemoryPart("update", sizes.working(tokens, self.recompute) - activations, update),
            self.cache(sequences),
            MemoryPart("graphs", sizes.graphs, "of decoding steps"),
            MemoryPart("runtime", RUNTIME, "CUDA and its libraries" if self.on_gpu else "Python and its libraries"),
        )
        freed = ("engine's weights", "KV cache", "reward model") if self.plan and self.plan.time_share else ()
        return tuple(part for part in parts if part.bytes and part.name not in freed)

    def least(self) -> int:
        if self.on_gpu:
            return least_bytes(self.sizes, self.plan_settings)
        tokens = min(self.config.token_budget, update_tokens(self.config), self.config.longest_sample)
        return sum(part.bytes for part in self.parts(tokens, 1))

    @property
    def _engine(self) -> str:
        if self.spec.gpu_share is not None:
            return f"{self.config.engine}, with its KV cache"
        if self.spec.casts_weights and (self.in_bfloat16 or self.on_gpu):
            return "bfloat16" if self.in_bfloat16 else "float32"
        return "float32, with merged adapters"

    def cache(self, sequences: int | None) -> MemoryPart:
        if self.spec.gpu_share is not None:
            return MemoryPart("KV cache", 0)
        capacity = self.budget.capacity(self.config.longest_sample)
        count = max(1, self.budget.slots(capacity)) if sequences is None else sequences
        about = f"{count:,} sequence{'s' if count > 1 else ''} of {capacity:,} tokens"
        about += ", and kept ids" * (self.budget.kept_bytes > 0)
        return MemoryPart("KV cache", self.budget.sequences_bytes(count, capacity), about)

    def changed(self, **settings: object) -> Need:
        train = self.config.train.model_copy(update=settings)
        return Need(self.config.model_copy(update={"train": train}), self.size, self.machine)


def _verdict(report: MemoryReport, need: Need) -> str:
    machine, usable = report.machine, int(USABLE * report.machine.bytes)
    where = f"{machine.name} ({gib(machine.bytes)})"
    if need.fits and not need.cache_fits:
        allowed = f"{gib(need.budget.bytes)} for the KV cache, less than one sequence needs"
        enough = _rounded_up(1.01 * need.cache(1).bytes / GIB)
        return f"does not run on {where}: {allowed}; set sampling.kv_memory_gib={enough:g} or more"
    if need.plan is not None and need.plan.time_share:
        sampling = gib(need.sizes.sampling(need.plan.kv_bytes or 0))
        phases = f"about {gib(report.total)} while updating{' with recomputed layers' * need.plan.recompute}"
        return f"fits on {where} in turns (train.memory): {phases}, {sampling} while sampling"
    if report.total <= usable:
        return f"fits on {where}: about {gib(report.total)}, {report.share:.0%} of it"
    if need.fits:
        return f"fits on {where} with less than the recipe's {gib(report.total)}: {_less(need, usable)}"
    line = f"does not fit on {where}: {_needed(report, need)}"
    if need.on_gpu:
        return f"{line}; {remedy(need.sizes, need.plan_settings)}"
    recompute, small = {"gradient_checkpointing": True}, {"optimizer": "adamw_8bit"}
    for changes in (recompute, small, recompute | small):
        if need.changed(**changes).least() <= usable:
            words = " and ".join(f"train.{key}={str(value).lower()}" for key, value in changes.items())
            return f"{line}; with {words} it fits; {_ANOTHER}"
    smaller = " or a smaller model" if need.sizes.lora else ", a smaller model or model.lora"
    return f"{line}; use a machine with more memory{smaller}; {_ANOTHER}"


def _rounded_up(number: float) -> float:
    """To two digits: rounded down, a limit would be too low."""
    unit: float = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _needed(report: MemoryReport, need: Need) -> str:
    """The table's total and the least that a run needs, if they differ."""
    total, least = gib(report.total), gib(report.least)
    if report.total <= report.least or total == least:
        return f"it needs at least {least}"
    frees = need.on_gpu and need.plan_settings.memory != "keep" and need.plan_settings.engine_releases_memory
    how = "if the engine frees its memory during updates (train.memory)" if frees else "for one sample at a time"
    return f"it needs {total} for everything at once, and at least {least} {how}"


def _less(need: Need, usable: int) -> str:
    """Settings with which a recipe fits whose default micro-batches and KV cache do not."""
    longest = need.config.longest_sample
    of_tokens = {part.name: part.bytes for part in need.parts(longest)}
    left = usable - sum(of_tokens.values()) + of_tokens["activations"]
    if left >= of_tokens["activations"]:
        return f"set train.token_budget={left // need.token_bytes}"
    left = usable - need.least() + need.cache(1).bytes
    return f"set train.token_budget={longest} and sampling.kv_memory_gib={left / GIB:.2g}"
