"""Draws ablation.png: final accuracy and the compared quantities, learning curves and entropy of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from dapo_rl.base.files import beside
from dapo_rl.base.format import counted
from dapo_rl.lab.ablate.plan import AblationPlan, arms_by_part
from dapo_rl.lab.ablate.quantities import COMPARABLE, DEFAULT_COMPARED
from dapo_rl.lab.ablate.results import ArmResult, Curve
from dapo_rl.lab.ablate.statistics import INTERVAL
from dapo_rl.lab.ablate.techniques import DEFAULT_TABLE, TABLES
from dapo_rl.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from dapo_rl.runs.report_plot import SMOOTH_BEYOND, axis_title, light_grid, smooth, step_axis

TITLES = {
    "ladder": "Techniques added one by one",
    "leave-one-out": "Each technique left out of {whole}",
    "vary": "Varied",
}
STYLES = [
    (GREY, "o"),
    (SKY, "s"),
    (ORANGE, "^"),
    (GREEN, "D"),
    (PURPLE, "v"),
    (BLUE, "P"),
    (VERMILION, "X"),
    (BLACK, "*"),
]
"""Colours that colour-blind readers can tell apart, and markers for printing without colour."""

NARROW = 0.75

Style = tuple[str, str, str]


def draw_ablation(plan: AblationPlan, results: Sequence[ArmResult], path: Path) -> None:
    with beside(path) as draft:
        ablation_figure(plan, results).savefig(draft, format="png")


def ablation_figure(plan: AblationPlan, results: Sequence[ArmResult]) -> Figure:
    by_name = {result.arm.name: result for result in results}
    parts = arms_by_part(plan.arms)
    heights = [max(3.6, 1.2 + 0.42 * len(arms)) for arms in parts.values()]
    shown = list(dict.fromkeys((*DEFAULT_COMPARED, *plan.compared)))
    widths = [1.0, *(NARROW for _ in shown[1:]), 1.15, 1.15]
    size = (17 / 3.3 * sum(widths), sum(heights) + 0.8)
    picture = Figure(figsize=size, dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14))
    seeds = counted(len(plan.seeds), "seed")
    title = f"{plan.name}, {plan.steps}, {seeds}"
    picture.suptitle(title, fontsize=15, fontweight="bold", parse_math=False)
    if len(plan.seeds) > 1:
        key = f"bars: {INTERVAL}   ticks: seeds   bands: range over seeds"
        picture.supxlabel(key, fontsize=9, color="#666666")
    rows = picture.subplots(
        len(parts), len(widths), squeeze=False, gridspec_kw={"height_ratios": heights, "width_ratios": widths}
    )
    for (part, arms), (*ends, accuracy, entropy) in zip(parts.items(), rows, strict=True):
        of_part = [by_name[arm.name] for arm in arms]
        styles = [_style(part, i) for i in range(len(arms))]
        for name, axis in zip(shown, ends, strict=True):
            _ends(axis, of_part, styles, name)
        title = TITLES[part].format(whole=TABLES[plan.table or DEFAULT_TABLE].whole)
        ends[0].set_title(title, loc="left", fontsize=12)
        _label_arms(ends, of_part)
        _curves(accuracy, [[r.accuracies for r in result.runs] for result in of_part], styles)
        axis_title(accuracy, "Held-out accuracy", "% correct")
        _curves(entropy, [[r.entropies for r in result.runs] for result in of_part], styles, smoothed=True)
        axis_title(entropy, "Entropy", "nats per token")
        entropy.set_ylim(bottom=0)
    for column in (-2, -1):
        _same_scale([row[column] for row in rows])
    for column in range(len(shown)):
        ranges = [row[column].get_xlim() for row in rows]
        for row in rows:
            row[column].set_xlim(min(low for low, _ in ranges), max(high for _, high in ranges))
    return picture


def _style(part: str, index: int) -> Style:
    """A technique has the same colour in both halves of Table 1; so does full DAPO, which ends one half and starts
    the other."""
    if part == "leave-one-out":
        index = 5 if index == 0 else index if index < 5 else index + 1
    color, marker = STYLES[index % len(STYLES)]
    return color, marker, ("-", "--", ":", "-.")[index // len(STYLES) % 4]


def _ends(axis: Axes, results: Sequence[ArmResult], styles: Sequence[Style], name: str) -> None:
    quantity = COMPARABLE[name]
    for row, (result, (color, marker, line)) in enumerate(zip(results, styles, strict=True)):
        values = [quantity.scale * value for value in result.by_seed(name).values()]
        estimate = result.estimate(name)
        if estimate is None:
            continue
        mean = quantity.scale * estimate.mean
        if estimate.half_width is not None:
            width = quantity.scale * estimate.half_width
            axis.errorbar(mean, row, xerr=width, color=color, capsize=4, linewidth=1.8, zorder=2)
            axis.plot(values, [row + 0.24] * len(values), "|", color=color, markersize=7, zorder=2)
        inside = color if line == "-" else "white"
        axis.plot([mean], [row], marker, color=color, markerfacecolor=inside, markersize=9, zorder=3)
        written = quantity.write(estimate.mean)
        axis.annotate(written, (mean, row), xytext=(0, 9), textcoords="offset points", ha="center")
    axis.set_ylim(len(results) - 0.4, -0.8)
    axis.margins(x=0.12)
    axis.set_xlabel("final held-out accuracy, %" if name == "accuracy" else quantity.head)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5))
    light_grid(axis, "x")


def _label_arms(axes: Sequence[Axes], results: Sequence[ArmResult]) -> None:
    """The names of the arms, on the left; they serve as the legend."""
    for axis in axes:
        axis.set_yticks(range(len(results)), [""] * len(results))
    labels = [result.arm.label for result in results]
    shortened = [label if len(label) <= 40 else f"{label[:39]}…" for label in labels]
    axes[0].set_yticklabels(shortened, parse_math=False)


def _curves(axis: Axes, arms: Sequence[Sequence[Curve]], styles: Sequence[Style], *, smoothed: bool = False) -> None:
    for curves, (color, marker, line) in zip(arms, styles, strict=True):
        measured = [curve for curve in curves if curve]
        steps = sorted(set.intersection(*(set(curve) for curve in measured))) if measured else []
        if not steps:
            continue
        values = np.array([[curve[step] for step in steps] for curve in measured])
        if smoothed and len(steps) > SMOOTH_BEYOND:
            values = np.array([smooth(row) for row in values])
        if not smoothed:
            values *= 100
        every = max(1, len(steps) // 10)
        axis.plot(
            steps,
            values.mean(axis=0),
            color=color,
            linestyle=line,
            marker=marker,
            markerfacecolor=color if line == "-" else "white",
            markersize=6,
            markevery=every,
            linewidth=1.8,
        )
        if len(values) > 1:
            axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.12, linewidth=0)
    step_axis(axis)


def _same_scale(axes: Sequence[Axes]) -> None:
    """Uses one scale, so that the two halves of Table 1 can be compared."""
    limits = [axis.get_ylim() for axis in axes if axis.has_data()]
    for axis in axes:
        if limits:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
