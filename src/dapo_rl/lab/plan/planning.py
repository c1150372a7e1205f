"""A plan: the memory and the time of a recipe on GPUs by each way of sampling, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.plan.layout import GpuMemory, Layout, choose_layout
from dapo_rl.lab.plan.rates import GPUS_PER_NODE, Gpu, Rates
from dapo_rl.lab.plan.simulation import ENOUGH, FEW, Simulation, Way, WayResult, simulated_share
from dapo_rl.lab.simulated_world import World
from dapo_rl.memory.model_size import ModelSize, size_of

LIMITS = {
    "decode": "reading weights and keys in decoding; a GPU with more bandwidth, or more GPUs",
    "tail": "the tail of long samples; streaming with sampling.ahead, or fewer sampling.max_new_tokens",
    "pages": "pages: samples wait for memory; a higher --tensor-parallel, or more GPUs",
    "even": "the update's FLOPs; more GPUs, or without recomputed layers",
    "uneven": "the longest sample of each mini-batch, for which ranks wait; fewer train.mini_batches",
    "traffic": "gathering weights and gradients; a larger train.token_budget",
}
"""What can limit a step, and what shortens it."""
TOGETHER: tuple[Way, ...] = ("rounds", "streaming")
SPLITS = (0.375, 0.5, 0.625, 0.75, 0.875)
"""Shares of the GPUs that sample, which are tried in this order until one is slower than the last."""


@dataclass(frozen=True, slots=True)
class Question:
    config: Config
    gpu: Gpu
    gpus: int
    tensor_parallel: int | None = None
    rollout_gpus: int | None = None
    acceptance: float = 0.5
    median: float | None = None
    """Of the lengths; by default an eighth of the longest."""
    spread: float = 0.993
    prompt_tokens: int = 128
    seed: int = 0

    @property
    def world(self) -> World:
        sampling = self.config.sampling
        median = self.median or sampling.max_new_tokens / 8
        passing = self.acceptance if sampling.dynamic else 1.0
        return World(passing, sampling.group_size, self.seed, median, self.spread, sampling.max_new_tokens)


@dataclass(frozen=True, slots=True)
class RunPlan:
    question: Question
    together: GpuMemory
    """Sampling and updating on the same GPUs."""
    apart: GpuMemory | None
    """On separate GPUs, if that is possible."""
    results: tuple[WayResult, ...]
    problems: tuple[str, ...]
    """What does not fit, and what mends it."""

    @property
    def steps(self) -> int:
        return self.question.config.train.steps


def plan_run(question: Question) -> RunPlan:
    size = size_of(question.config.model.name)
    _check(question)
    together = _memory(question, size, None)
    results, problems = [], []
    if together.fits:
        results += [_simulate(question, together, way) for way in TOGETHER]
    else:
        problems.append(f"on the same GPUs: {together.remedy()}")
    apart, found, why = _apart(question, size, together.layout.tensor_parallel)
    results += found
    problems += why
    return RunPlan(question, together, apart, tuple(results), tuple(problems))


def limiting(result: WayResult) -> tuple[str, float]:
    """What a step spends the most time on, and its seconds."""
    updates = [step.update for step in result.counted]
    parts = result.sampling_parts()
    of_update = ("even", "uneven", "traffic")
    trained = {name: sum(getattr(update, name) for update in updates) / len(updates) for name in of_update}
    if result.way == "asynchronous":  # the slower side limits both
        parts = trained if result.update_seconds > 0.9 * result.step_seconds else parts
    else:
        parts |= trained
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name]


def _simulate(question: Question, memory: GpuMemory, way: Way, enough: int = ENOUGH) -> WayResult:
    layout = memory.layout
    rates = Rates(memory.size, question.gpu, layout.tensor_parallel)
    share = simulated_share(question.config.sampling.prompts_per_step, layout.engines, enough)
    simulation = Simulation(memory, rates, question.world, question.prompt_tokens, share=share)
    if way == "rounds":  # a step leaves nothing to the next one
        simulation = replace(simulation, steps=2, warmup=0)
    return simulation.run(way)


def _memory(question: Question, size: ModelSize, rollout_gpus: int | None) -> GpuMemory:
    layout = Layout(question.gpus, rollout_gpus=rollout_gpus)
    layout = choose_layout(question.config, size, question.gpu, layout, question.tensor_parallel)
    return GpuMemory(question.config, size, question.gpu, layout)


def _apart(question: Question, size: ModelSize, tp: int) -> tuple[GpuMemory | None, list[WayResult], list[str]]:
    engine = question.tensor_parallel or 1
    tried = [question.rollout_gpus] if question.rollout_gpus else _splits(question.gpus, tp)
    splits = [n for n in tried if n % engine == 0]
    if not splits:
        alone = f"an engine of {engine} GPUs leaves none to train on" if engine > 1 else "needs two GPUs or more"
        return None, [], [f"asynchronous: {alone}"]
    best, least, memory = None, inf, _memory(question, size, splits[0])
    for rollout in splits:
        memory = _memory(question, size, rollout)
        if memory.fits:
            seconds = _simulate(question, memory, "asynchronous", FEW).step_seconds if len(splits) > 1 else 0.0
            if seconds >= least:
                break  # the trainer has too few GPUs from here on
            best, least = memory, seconds
    if best is None:
        return memory, [], [f"asynchronous with {splits[-1]} GPUs for sampling: {memory.remedy()}"]
    return best, [_simulate(question, best, "asynchronous")], []


def _splits(gpus: int, tp: int) -> list[int]:
    """Numbers of GPUs that sample, in whole nodes or engines where that is possible."""
    unit = next((unit for unit in (GPUS_PER_NODE, tp) if gpus >= 2 * unit and unit % tp == 0), 1)
    shares = {min(max(unit, round(share * gpus / unit) * unit), gpus - unit) for share in SPLITS}
    return sorted(shares) if gpus > 1 else []


def _check(question: Question) -> None:
    rollout, tp = question.rollout_gpus, question.tensor_parallel or 1
    if rollout is not None and not 0 < rollout < question.gpus:
        raise UserError(f"--rollout-gpus: {rollout} leaves no GPU to train on, of {question.gpus}")
    for option, number in (("--gpus", question.gpus), ("--rollout-gpus", rollout or 0)):
        if number % tp:
            raise UserError(f"--tensor-parallel: {tp} does not divide {option} {number}")
    if not 0 < question.acceptance <= 1:
        raise UserError(f"--acceptance: {question.acceptance:g} is not above 0 and at most 1")
