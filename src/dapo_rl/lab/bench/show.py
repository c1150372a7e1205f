"""Prints the reports of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import counted


def print_benchmarks(
    reports: Sequence[dict[str, Any]], sweep: str | None = None, console: Console | None = None
) -> None:
    console = console or Console()
    first = reports[0]
    console.print(Text(_headline(first), style="bold"))
    console.print(Text(_machine(first), style="dim"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in (sweep, ""):
        if head is not None:
            table.add_column(head)
    for head in ("seconds", "tokens/s", "peak memory", "of the limit", "ratio"):
        table.add_column(head, justify="right")
    for report in reports:
        lead = [str(report[sweep])] if sweep else []
        table.add_row(*lead, _name(report), *_cells(report), _percent(report["limit"]["share"]), "")
        peer = report.get("against", {})
        for tried in peer.get("variants", ()):
            name = " ".join(filter(None, (peer["name"], tried["variant"])))
            if "error" in tried:
                table.add_row(*lead, name, Text(tried["error"][:60], style="red"), "", "", "", "")
            else:
                share = report["limit"]["floor_seconds"] / tried["seconds"]
                ratio = f"{tried['seconds'] / report['seconds']:.2f}×"
                table.add_row(*lead, name, *_cells(tried), _percent(share), ratio)
    console.print(table)
    for report in reports:
        if report["parts"]:
            parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report["parts"].items())
            console.print(Text(f"of a step: {parts}"), highlight=False)


def _headline(report: dict[str, Any]) -> str:
    millions = report["parameters"] / 1e6
    return (
        f"{report['bench']}: {report['model']} ({millions:,.0f} M), {counted(report['prompts'], 'prompt')} × "
        f"{counted(report['group'], 'sample')} × {_tokens(report)} after "
        f"{report['prompt_tokens']}, {report['dtype']} on {report['device']}"
    )


def _tokens(report: dict[str, Any]) -> str:
    lengths = report["lengths"]
    if lengths["distribution"].startswith("fixed:"):
        return counted(report["tokens"], "token")
    return (
        f"{lengths['distribution']} tokens (median {lengths['median']:,.0f}, mean {lengths['mean']:,.0f}, longest "
        f"{lengths['longest']:,}, cap {lengths['cap']:,})"
    )


def _machine(report: dict[str, Any]) -> str:
    machine, limit = report["machine"], report["limit"]
    name = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    rates = f"{limit['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s, {limit['matmul_flops_per_s'] / 1e12:,.3g} TFLOP/s"
    return f"{name}; torch {machine['torch']}; measured {rates}"


def _name(report: dict[str, Any]) -> str:
    return "dapo" if report["bench"] == "update" else f"dapo, {report['engine']}"


def _cells(numbers: dict[str, Any]) -> tuple[str, str, str]:
    memory = f"{numbers['peak_memory_bytes'] / 2**30:,.2f} GiB"
    return f"{numbers['seconds']:.3f}", f"{numbers['tokens_per_second']:,.0f}", memory


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
