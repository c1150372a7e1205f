"""Prints a plan in 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import count, duration, gib
from dapo_rl.lab.plan.layout import GpuMemory
from dapo_rl.lab.plan.measured import ERROR, ON
from dapo_rl.lab.plan.planning import LIMITS, RunPlan, limiting


def print_plan(plan: RunPlan, console: Console | None = None) -> None:
    console = console or Console()
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
            f"Rates are fitted to measurements on one {ON}, which they reproduce within {ERROR:.0%}. Traffic between "
            "GPUs is estimated from data sheets. Evaluations and checkpoints are not included."
        )
    )


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
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("sampling")
    for head in ("step", "sample", "update", "run", "GPU hours", "tokens", "age"):
        table.add_column(head, justify="right")
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
