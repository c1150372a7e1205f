"""Draws evaluation.png: metrics with intervals, pass@k over k, and differences between models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from dapo_rl.base.files import beside
from dapo_rl.base.format import counted
from dapo_rl.base.quote import printable
from dapo_rl.evals.table import Report, shown_metrics
from dapo_rl.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from dapo_rl.runs.report_plot import light_grid, percent_tick

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#000000", GREY)
LONGEST_NAME = 32


def draw_evaluation(report: Report, path: Path) -> None:
    with beside(path) as draft:
        evaluation_figure(report).savefig(draft, format="png")


def evaluation_figure(report: Report) -> Figure:
    names = [_short(model["model"]) for model in report["models"]]
    panels: list[Any] = [_shares]
    if report["k"] > 1:
        panels.append(_pass_curves)
    panels.append(_lengths)
    if report["comparisons"]:
        panels.append(_differences)
    height = 3.6 + 0.34 * len(names)
    picture = Figure(
        figsize=(4.6 * len(panels), height), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    for axis, panel in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axis, report)
        light_grid(axis)
    problems = max(model["problems"] for model in report["models"])
    title = f"{_short(report['data'], 60)}: {counted(problems, 'problem')}, {counted(report['k'], 'sample')} each"
    picture.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    marks = [picture.axes[0].plot([], [], marker="o", linewidth=0, color=color)[0] for color in _colors(names)]
    legend = picture.legend(marks, names, loc="outside lower left", ncols=min(len(names), 4), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return picture


def _shares(axis: Axes, report: Report) -> None:
    metrics = [name for name in shown_metrics(report) if "@" in name]
    _points(axis, metrics, [model["metrics"] for model in report["models"]])
    axis.set_title("Share correct", loc="left", fontsize=11)
    axis.set_ylim(-0.02, 1.02)
    axis.yaxis.set_major_formatter(percent_tick)


def _pass_curves(axis: Axes, report: Report) -> None:
    for model, color in zip(report["models"], _colors(report["models"]), strict=True):
        found = {int(name[5:]): row for name, row in model["metrics"].items() if name.startswith("pass@")}
        ks = sorted(found)
        value, low, high = ([_value(found[k][part]) for k in ks] for part in ("value", "low", "high"))
        axis.plot(ks, value, color=color, marker="o", markersize=4)
        axis.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.xaxis.set_minor_locator(NullLocator())
    axis.set_title("pass@k", loc="left", fontsize=11)
    axis.set_xlabel("k")
    axis.set_ylim(-0.02, 1.02)
    axis.yaxis.set_major_formatter(percent_tick)


def _lengths(axis: Axes, report: Report) -> None:
    _points(axis, ["response_length"], [model["metrics"] for model in report["models"]])
    axis.set_title("Response length", loc="left", fontsize=11)
    axis.set_ylabel("tokens")
    axis.set_xticks([0], ["mean"])
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])


def _differences(axis: Axes, report: Report) -> None:
    metrics = [name for name in shown_metrics(report) if "@" in name]
    others = report["models"][1:]
    rows = [{r["metric"]: r for r in report["comparisons"] if r["model"] == model["model"]} for model in others]
    axis.axhline(0, color="#666666", linewidth=1)
    _points(axis, metrics, rows, skip=1)
    axis.set_title(
        f"Difference from {_short(report['models'][0]['model'], 24)}", loc="left", fontsize=11, parse_math=False
    )
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:+.3g}" if share else "0"))
    axis.set_ylabel("points")


def _points(axis: Axes, metrics: Sequence[str], models: Sequence[Mapping[str, Any]], skip: int = 0) -> None:
    """A dot with its interval for each model, side by side for each metric."""
    width = min(0.6, 0.14 * len(models))
    for i, (found, color) in enumerate(zip(models, _colors(range(len(models) + skip))[skip:], strict=True)):
        shift = 0.0 if len(models) == 1 else width * (i / (len(models) - 1) - 0.5)
        for x, name in enumerate(metrics):
            value, low, high = (_value(found[name][part]) for part in ("value", "low", "high"))
            axis.plot([x + shift] * 2, [low, high], color=color, linewidth=2, alpha=0.6)
            axis.plot([x + shift], [value], color=color, marker="o", markersize=6)
    axis.set_xticks(range(len(metrics)), metrics)
    axis.set_xlim(-0.5, len(metrics) - 0.5)


def _colors(models: Sequence[Any]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(models))]


def _value(number: float | None) -> float:
    return math.nan if number is None else number


def _short(name: str, longest: int = LONGEST_NAME) -> str:
    """Truncates a name from the left: the end of a path identifies it."""
    name = printable(name)
    return name if len(name) <= longest else f"…{name[1 - longest :]}"
