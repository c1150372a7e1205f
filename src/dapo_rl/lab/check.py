"""`dapo check`: compares a recipe with DAPO's or VAPO's paper, and prints its batch arithmetic and memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import gib
from dapo_rl.base.quote import printable
from dapo_rl.config import Config
from dapo_rl.data.overlap import check_apart
from dapo_rl.errors import UserError
from dapo_rl.lab.batch_arithmetic import BatchArithmetic, batch_arithmetic, judged_by_policy
from dapo_rl.lab.papers import PAPERS, Comparison, find_paper
from dapo_rl.memory.report import MemoryReport, memory_json


@dataclass(frozen=True, slots=True)
class Report:
    paper: str
    arxiv: str
    why: str
    """Why it is this paper, if the recipe decides."""
    verdict: str
    rows: tuple[Comparison, ...]
    arithmetic: BatchArithmetic
    memory: MemoryReport | None = None
    """Whether the recipe fits on a machine, if that was asked."""
    note: str = ""
    """What these numbers leave out."""


def conformance(config: Config, memory: MemoryReport | None = None, paper: str | None = None) -> Report:
    """Compares every component, except those that the recipe's other settings make meaningless. `paper` is a name of
    `PAPERS`; by default it depends on whether the recipe has a critic."""
    check_apart(config.data.train, config.data.eval)
    chosen = find_paper(config, paper)
    rows = chosen.compare(config)
    why = "" if paper is not None else f"the recipe has {'a' if config.has_critic else 'no'} critic"
    arithmetic, note = batch_arithmetic(config), judged_by_policy(config)
    return Report(chosen.name, chosen.arxiv, why, _verdict(rows, chosen.name), rows, arithmetic, memory, note)


def conformance_json(report: Report) -> str:
    memory = None if report.memory is None else memory_json(report.memory)
    rows = asdict(replace(report, memory=None)) | {"memory": memory}
    return json.dumps({key: value for key, value in rows.items() if key != "note" or value}, indent=2)


def print_conformance(report: Report, console: Console | None = None) -> None:
    console = console or Console()
    console.print(Text(_heading(report), style="bold"))
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("", width=2)
    for head, widest in (("component", 18), ("reference", 11), ("paper", 21), ("this recipe", 40)):
        table.add_column(head, max_width=widest, overflow="fold")
    for kind in ("algorithm", "settings", "evaluation"):
        for row in (row for row in report.rows if row.kind == kind):
            mark, style = ("=", "green") if row.same else ("!=", "bold red" if kind == "algorithm" else "yellow")
            cells = (row.component, row.reference, row.paper, row.recipe)
            table.add_row(Text(mark, style=style), *(Text(_encodable(cell, console)) for cell in cells))
        table.add_section()
    console.print(table)
    console.print()
    for heading, chosen in (("Differences", False), ("Remarks on what matches", True)):
        remarks = [row for row in report.rows if row.same is chosen and row.meaning]
        if remarks:
            console.print(Text(heading, style="bold"))
        for row in remarks:
            keys = f" ({', '.join(row.keys)})" if row.keys else ""
            text = Text.assemble((row.component, "bold"), (keys, "dim"), f": {_encodable(row.meaning, console)}")
            console.print(Padding(text, (0, 0, 0, 2)))
    console.print()
    console.print(_arithmetic_table(report.arithmetic))
    if report.note:
        console.print(Text(_encodable(printable(report.note), console)))
    console.print()
    if report.memory is not None and report.memory.parts:
        machine = report.memory.machine
        console.print(Text(printable(f"Memory on {machine.name} ({gib(machine.bytes)}), estimated"), style="bold"))
        console.print(_memory_table(report.memory))
        console.print()
    console.print(Text(report.verdict, style="bold"))
    if report.memory is not None:
        console.print(
            Text(printable(report.memory.verdict), style="bold red" if report.memory.fits is False else "bold")
        )


def check_memory_fits(report: Report) -> None:
    """Raises a UserError if the run does not fit, so that scripts see it."""
    memory = report.memory
    if memory is not None and memory.fits is False:
        raise UserError(f"check: the run {memory.verdict.partition(': ')[0]}")


def _heading(report: Report) -> str:
    heading = f"Compared with {report.paper} (arXiv {report.arxiv})"
    if not report.why:
        return heading
    other = next(name for name, paper in PAPERS.items() if paper.name != report.paper)
    return f"{heading}, as {report.why}; for {PAPERS[other].name}: --paper {other}"


def _encodable(text: str, console: Console) -> str:
    """Names of files and formulas of losses can have characters that the stream has not."""
    return text.encode(console.encoding, "replace").decode(console.encoding)


def _arithmetic_table(numbers: BatchArithmetic) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    for label, value in (
        ("groups per step", numbers.groups_per_step),
        ("samples per step", numbers.samples_per_step),
        ("updates per step", numbers.updates_per_step),
        ("samples per update", numbers.samples_per_update),
        ("maximum tokens generated per step, without redraws", numbers.tokens_generated_per_step),
        ("maximum tokens generated per step, at the cap", numbers.tokens_generated_per_step_at_cap),
        ("maximum tokens trained on per step", numbers.tokens_trained_per_step),
        ("steps", numbers.steps),
        ("steps of value pre-training, for the critic alone", numbers.pretrain_steps),
        ("total updates of the policy" if numbers.pretrain_steps else "total updates", numbers.total_updates),
    ):
        if value:
            grid.add_row(label, f"{value:,}")
    return grid


def _memory_table(memory: MemoryReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    for part in memory.parts:
        share = part.bytes / memory.machine.bytes
        grid.add_row(f"  {part.name}", gib(part.bytes), f"{share:.0%}", Text(part.about))
    grid.add_row("  total", gib(memory.total), f"{memory.share:.0%}", "")
    return grid


def _verdict(rows: tuple[Comparison, ...], paper: str) -> str:
    different = [row for row in rows if not row.same]
    missing = [row.component for row in different if row.kind == "algorithm"]
    if missing:
        return f"not {paper}: {', '.join(missing)}"
    if different:
        return f"algorithm conformant, {len(different)} setting{'s differ' if len(different) > 1 else ' differs'}"
    return "conformant: every row matches the paper"
