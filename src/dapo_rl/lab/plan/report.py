"""`dapo plan`: makes a plan and prints it in 80 columns or as JSON, or draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import count, duration, gib
from dapo_rl.base.quote import printable
from dapo_rl.base.table import figure_table
from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.lab.batch_arithmetic import judged_by_policy
from dapo_rl.lab.plan.layout import GpuMemory
from dapo_rl.lab.plan.planning import LIMITS, Question, RunPlan, limiting, plan_run
from dapo_rl.lab.plan.rates import ERROR, MEASURED_ON, find_gpu
from dapo_rl.lab.plan.simulation import WayResult
from dapo_rl.memory.report import GIB, MemoryPart


def run_plan(config: Config, gpu: str, options: Mapping[str, Any], picture: Path | None, as_json: bool) -> None:
    """`options` are the other fields of a Question."""
    question = Question(config, find_gpu(gpu), **options)
    with Console(stderr=True).status("simulating"):
        plan = plan_run(question)
    if as_json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        print_plan(plan)
    if not plan.results:
        raise UserError(f"plan: the run does not fit on {question.gpus} × {gpu}")
    if picture is not None:
        from dapo_rl.lab.plan.picture import draw_plan

        draw_plan(plan, picture)


def print_plan(plan: RunPlan) -> None:
    console = Console()
    question = plan.question
    sampling = question.config.sampling
    console.print(Text(f"{question.config.model.name} on {question.gpus:,} × {question.gpu.name}", style="bold"))
    world = question.world
    console.print(
        Text(
            f"{sampling.prompts_per_step} × {sampling.group_size} samples per step; lengths lognormal, median "
            f"{world.median:,.0f}, at most {world.longest:,} tokens; {world.acceptance:.0%} of the groups pass"
        )
    )
    console.print()
    for title, memory in (("the same GPUs sample and update", plan.together), ("separate GPUs", plan.apart)):
        if memory is not None:
            _print_memory(console, title, memory)
    if plan.results:
        _print_ways(console, plan)
    for problem in plan.problems:
        console.print(Text(f"does not fit, {problem}", style="bold red"))
    console.print(
        Text(
            f"Rates are fitted to measurements on one {MEASURED_ON}, which they reproduce within {ERROR:.0%}. Traffic "
            "between GPUs is estimated from data sheets. Evaluations and checkpoints are not included."
        )
    )
    if note := judged_by_policy(question.config):
        console.print(Text(printable(note)))


def _print_memory(console: Console, title: str, memory: GpuMemory) -> None:
    layout = memory.layout
    engines = f"{layout.engines} engine{'s' * (layout.engines > 1)} of {layout.tensor_parallel}"
    head = f"GiB per GPU, {title}: {layout.trainers} train, {engines} GPU{'s' * (layout.tensor_parallel > 1)}"
    console.print(Text(head, style="bold"))
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    updating = {part.name: part for part in memory.updating()}
    during = {part.name: part for part in memory.sampling()}
    table.add_row("", "updating", "sampling", "")
    for name in dict.fromkeys([*updating, *during]):
        cells = [f"{parts[name].bytes / 2**30:.1f}" if name in parts else "" for parts in (updating, during)]
        table.add_row(name, *cells, (updating.get(name) or during[name]).about)
    totals = [f"{sum(part.bytes for part in parts.values()) / 2**30:.1f}" for parts in (updating, during)]
    table.add_row("total", *totals, f"of {gib(memory.gpu.memory.bytes)}", style="bold")
    console.print(Padding(table, (0, 0, 1, 2)))


def _print_ways(console: Console, plan: RunPlan) -> None:
    table = figure_table("sampling", "step", "sample", "update", "run", "GPU hours", "tokens", "age")
    for result in plan.results:
        run = plan.steps * result.step_seconds
        table.add_row(
            result.way,
            *map(duration, (result.step_seconds, result.sampling_seconds, result.update_seconds, run)),
            f"{run / 3600 * result.layout.gpus:,.0f}",
            count(result.tokens[0]),
            f"{result.staleness:.2f}",
        )
    console.print(table)
    console.print(Text(f"run: {plan.steps:,} steps; tokens: generated per step; age: of groups, in weight versions"))
    console.print()
    for result in plan.results:
        name, seconds = limiting(result)
        text = Text.assemble((result.way, "bold"), f": {duration(seconds)} of a step is {LIMITS[name]}")
        console.print(Padding(text, (0, 0, 0, 2)))
    console.print()


def plan_json(plan: RunPlan) -> dict[str, Any]:
    question = plan.question
    return {
        "gpu": question.gpu.name,
        "gpus": question.gpus,
        "error": ERROR,
        "memory": {
            "same_gpus": _memory_figures(plan.together),
            "separate_gpus": None if plan.apart is None else _memory_figures(plan.apart),
        },
        "ways": {result.way: _way_figures(result, plan.steps) for result in plan.results},
        "problems": list(plan.problems),
    }


def _way_figures(result: WayResult, steps: int) -> dict[str, Any]:
    generated, trained = result.tokens
    name, seconds = limiting(result)
    return {
        "tensor_parallel": result.layout.tensor_parallel,
        "rollout_gpus": result.layout.rollout_gpus,
        "step_seconds": round(result.step_seconds, 2),
        "sampling_seconds": round(result.sampling_seconds, 2),
        "update_seconds": round(result.update_seconds, 2),
        "run_hours": round(steps * result.step_seconds / 3600, 2),
        "gpu_hours": round(steps * result.step_seconds / 3600 * result.layout.gpus),
        "generated_tokens": round(generated),
        "trained_tokens": round(trained),
        "staleness": round(result.staleness, 3),
        "preempted": result.preempted,
        "limit": name,
        "limit_seconds": round(seconds, 2),
    }


def _memory_figures(memory: GpuMemory) -> dict[str, Any]:
    def gibibytes(parts: tuple[MemoryPart, ...]) -> dict[str, float]:
        return {part.name: round(part.bytes / GIB, 3) for part in parts}

    return {
        "fits": memory.fits,
        "gib": round(memory.gpu.memory.bytes / GIB, 2),
        "updating": gibibytes(memory.updating()),
        "sampling": gibibytes(memory.sampling()),
        "pages": memory.pages,
    }
