"""Prints the report of an evaluation as tables. Names come from the user and are escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo_rl.base.format import counted
from dapo_rl.base.quote import printable

Report = Mapping[str, Any]


def shown_metrics(report: Report) -> dict[str, str]:
    """The metrics to show, with the kind of each number."""
    k = report["k"]
    shares = [f"avg@{k}", f"pass@{k}", f"cons@{k}"] if k > 1 else [f"avg@{k}"]
    score = {"score": "score"} if any(model.get("graded") for model in report["models"]) else {}
    return dict.fromkeys(shares, "share") | score | {"response_length": "tokens", "truncated": "share"}


def print_evaluation(report: Report, console: Console | None = None) -> None:
    console = console or Console()
    metrics = shown_metrics(report)
    console.print(_figures(report, metrics))
    if report["comparisons"]:
        console.print()
        console.print(_differences(report, metrics))
    console.print("intervals: 95%, bootstrap over problems; p: paired permutation test over problems", style="dim")


def _figures(report: Report, metrics: Mapping[str, str]) -> Table:
    problems, samples = counted(report["models"][0]["problems"], "problem"), counted(report["k"], "sample")
    table = _table(f"{problems}, {samples} each", "", "mean", "interval")
    for model in report["models"]:
        name = printable(model["model"])
        for metric, kind in metrics.items():
            value, low, high = (_number(model["metrics"][metric][part], kind) for part in ("value", "low", "high"))
            table.add_row(Text(name), _heading(metric), value, f"({low} to {high})")
            name = ""
        if failed := model.get("verifier_errors"):
            table.add_row("", "left out", f"{failed} of {model['samples']}", "")
    return table


def _differences(report: Report, metrics: Mapping[str, str]) -> Table:
    first = printable(report["models"][0]["model"])
    table = _table(f"compared with {first}", "", "difference", "interval", "p")
    before = ""
    for row in report["comparisons"]:
        if kind := metrics.get(row["metric"]):
            value, low, high = (_number(row[part], kind, sign="+") for part in ("value", "low", "high"))
            name, before = "" if row["model"] == before else printable(row["model"]), row["model"]
            table.add_row(Text(name), _heading(row["metric"]), value, f"({low} to {high})", _p(row["p"]))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(Text(first), overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _heading(name: str) -> str:
    return {"response_length": "tokens", "truncated": "cut off", "score": "mean score"}.get(name, name)


def _number(value: float | None, kind: str, sign: str = "") -> str:
    if value is None:
        return "-"
    if kind == "share":
        return f"{100 * value:{sign}.1f}%"
    return f"{value:{sign}.3f}" if kind == "score" else f"{value:{sign}.1f}"


def _p(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
