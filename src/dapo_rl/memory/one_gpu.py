"""The memory plan of a run in one process on a GPU, made before its first step.

Everything stays in memory if it fits (`keep`). Otherwise sampling and updating take turns: during an update the engine
gives up its weights and its cache, and while it samples there are no gradients. If that is not enough, each layer is
recomputed in the backward pass. A run that still does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dapo_rl.base.format import gib
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.memory.sizes import STATE, RunSizes, update_tokens

Recompute = bool | Literal["auto"]

SMALL_BATCH = 2048
"""Each micro-batch reads and writes all weights and gradients, which takes as long as computing some 600 tokens. With
fewer tokens than this, that costs more than recomputing the layers of larger micro-batches."""
NOTE = "memory: "
"""The beginning of a plan's note."""
MOST_TOKENS = 2**17
"""Larger micro-batches are not faster."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    time_share: bool = False
    """Whether the engine releases its memory during updates."""
    recompute: bool = False
    """Whether layers are recomputed in the backward pass."""
    kv_bytes: int | None = None
    """The engine's cache; None: its own default."""
    token_budget: int | None = None
    """Tokens per micro-batch; None: the policy's own default."""
    note: str | None = None
    """One line for the user, unless everything stays in memory."""


def recomputes(config: Config, plan: MemoryPlan | None) -> bool:
    """Whether a run recomputes layers, by its settings or else by its plan; a run without a plan does not fit."""
    wanted = config.train.gradient_checkpointing
    return (plan is None or plan.recompute) if wanted == "auto" else wanted


def micro_batch_tokens(config: Config, plan: MemoryPlan | None) -> int:
    """Tokens of the largest micro-batch: the budget, or all samples of an update if they are fewer."""
    planned = plan.token_budget if plan and not config.train.token_budget else None
    return min(planned or config.token_budget, update_tokens(config))


@dataclass(frozen=True, slots=True)
class PlanSettings:
    memory: Literal["auto", "keep", "time_share"] = "auto"
    recompute: Recompute = "auto"
    engine_releases_memory: bool = True
    """Whether the engine can release its memory."""


def plan_memory(sizes: RunSizes, settings: PlanSettings) -> MemoryPlan:
    """The first plan that fits; raises a UserError with the sums if there is none."""
    if settings.memory == "time_share" and not settings.engine_releases_memory:
        raise UserError(
            "train.memory: time_share needs engine=native on a GPU with virtual memory; set train.memory=auto"
        )
    plan = find_plan(sizes, settings)
    if plan is None:
        raise UserError(f"train.memory: {refusal(sizes, settings)}")
    return plan


def find_plan(sizes: RunSizes, settings: PlanSettings) -> MemoryPlan | None:
    option = next((option for option in _options(sizes, settings) if option.need(sizes) <= sizes.usable), None)
    return None if option is None else option.plan(sizes, settings)


def least_bytes(sizes: RunSizes, settings: PlanSettings) -> int:
    """The bytes of the smallest plan: micro-batches of one sample, and a cache for one sequence."""
    return min(replace(option, tokens=sizes.longest).need(sizes) for option in _options(sizes, settings))


def refusal(sizes: RunSizes, settings: PlanSettings) -> str:
    """Why a run does not fit, with the sums and what to do."""
    smallest = min(_options(sizes, settings), key=lambda option: replace(option, tokens=sizes.longest).need(sizes))
    recompute, phase = smallest.recompute, "updating"
    parts = sizes.state | {"one sample": sizes.working(sizes.longest, recompute)}
    if not smallest.time_share:
        parts |= {"engine": sizes.engine + sizes.kv_least}
    elif sizes.sampling(sizes.kv_least) > sizes.updating(sizes.longest, recompute):
        phase = "sampling"
        parts |= {"gradients": 0, "one sample": 0, "engine": sizes.engine + sizes.kv_least}
        parts[STATE["reference"]] -= sizes.teacher
    else:
        parts[STATE["reference"]] -= sizes.teacher_or_gradients
    listed = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts.items() if nbytes)
    needs = f"the run needs at least {gib(least_bytes(sizes, settings))} while {phase} ({listed})"
    return f"{needs}, and the GPU has {gib(sizes.usable)} to use; {remedy(sizes, settings)}"


def remedy(sizes: RunSizes, settings: PlanSettings) -> str:
    """Settings with which a run fits, or what else to do."""
    small = replace(sizes, moments=min(sizes.moments, sizes.gradients // 2))
    recomputing = replace(settings, recompute="auto")
    turning = replace(recomputing, memory="auto")
    tried: list[tuple[str, RunSizes, PlanSettings]] = [
        ("a lower sampling.kv_memory_gib", replace(sizes, kv_setting=None), settings),
        ("train.gradient_checkpointing=true", sizes, recomputing),
        ("train.memory=auto", sizes, replace(settings, memory="auto")),
        ("train.optimizer=adamw_8bit", small, settings),
        ("train.gradient_checkpointing=true and train.optimizer=adamw_8bit", small, recomputing),
        ("train.memory=auto and train.optimizer=adamw_8bit", small, turning),
    ]
    for words, with_sizes, with_settings in tried:
        if (with_sizes, with_settings) != (sizes, settings) and find_plan(with_sizes, with_settings):
            return f"with {words} it fits"
    return f"use a larger GPU, a smaller model, {'' if sizes.lora else 'model.lora, '}or fewer sampling.max_new_tokens"


@dataclass(frozen=True, slots=True)
class _Option:
    time_share: bool
    recompute: bool
    tokens: int
    """Tokens per micro-batch, at least."""
    kv: int
    """Bytes of the cache, at least."""
    as_usual: bool = False
    """Whether the engine and the policy take their own defaults."""

    def need(self, sizes: RunSizes) -> int:
        if self.time_share:
            return max(sizes.sampling(self.kv), sizes.updating(self.tokens, self.recompute))
        return sizes.keeping(self.kv, self.tokens, self.recompute)

    def plan(self, sizes: RunSizes, settings: PlanSettings) -> MemoryPlan:
        if self.as_usual:
            return MemoryPlan(recompute=self.recompute)
        if self.time_share:
            kv = min(sizes.kv_most, self.kv + sizes.usable - sizes.sampling(self.kv))
            left = sizes.usable - sizes.updating(0, self.recompute) + sizes.working(0, self.recompute)
        else:  # half for the cache, half for activations
            kv = min(sizes.kv_default, self.kv + (sizes.usable - self.need(sizes)) // 2)
            left = sizes.usable - sizes.keeping(kv, 0, self.recompute)
            left += max(sizes.prefill, sizes.working(0, self.recompute))
        tokens = max(min(sizes.tokens_in(left, self.recompute), MOST_TOKENS), sizes.longest)
        return MemoryPlan(self.time_share, self.recompute, kv, tokens, self._note(sizes, settings, kv))

    def _note(self, sizes: RunSizes, settings: PlanSettings, kv: int) -> str:
        everything = gib(sizes.keeping(sizes.kv_default, self.tokens, recompute=settings.recompute is True))
        line = f"{NOTE}everything at once would take {everything} of the usable {gib(sizes.usable)}"
        if self.time_share:
            line += f"; the engine frees {gib(sizes.engine + kv)} for each update, and rebuilds its weights after it"
        else:
            line += f"; the KV cache is limited to {gib(kv)}"
        if self.recompute and settings.recompute == "auto":
            line += "; layers are recomputed in the backward pass, which takes about a quarter longer"
        return line


def _options(sizes: RunSizes, settings: PlanSettings) -> Iterator[_Option]:
    both = (False, True) if settings.recompute == "auto" else (settings.recompute is True,)

    def option(time_share: bool, recompute: bool, kv: int, as_usual: bool = False) -> _Option:
        tokens = sizes.longest
        if settings.recompute == "auto" and not recompute:
            tokens = max(tokens, min(SMALL_BATCH, sizes.update_tokens))
        return _Option(time_share, recompute, tokens, kv, as_usual)

    if settings.memory != "time_share":
        yield option(False, both[0], sizes.kv_default, as_usual=True)
    time_share = settings.memory != "keep" and settings.engine_releases_memory
    yield from (option(time_share, recompute, sizes.kv_least) for recompute in both)
