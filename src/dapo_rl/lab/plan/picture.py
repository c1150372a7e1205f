"""Draws the timeline of a plan: the samples that run, and the updates, by each way of sampling."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from dapo_rl.base.files import beside
from dapo_rl.base.format import duration
from dapo_rl.lab.plan.planning import RunPlan
from dapo_rl.lab.plan.simulation import WayResult
from dapo_rl.palette import BLUE, GREY, ORANGE
from dapo_rl.runs.report_plot import light_grid

SHOWN = 3
"""Steps in the picture, those after the warm-up first."""


def draw_plan(plan: RunPlan, path: Path) -> None:
    question, results = plan.question, plan.results
    size = (13, 1.2 + 2.4 * max(1, len(results)))
    figure = Figure(figsize=size, dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    title = f"{question.config.model.name} on {question.gpus:,} × {question.gpu.name}"
    figure.suptitle(title, fontsize=15, fontweight="bold", parse_math=False)
    axes = figure.subplots(max(1, len(results)), 1, squeeze=False, sharex=True)[:, 0]
    longest = max((result.counted[:SHOWN][-1].end - result.begin for result in results), default=1.0)
    for axis, result in zip(axes, results, strict=False):
        _timeline(axis, result, longest)
    axes[-1].set_xlabel("minutes")
    with beside(path) as draft:
        figure.savefig(draft, format="png")


def _timeline(axis: Axes, result: WayResult, longest: float) -> None:
    begin = result.begin
    loads = [load for load in result.loads if begin <= load.time <= begin + longest]
    minutes = [(load.time - begin) / 60 for load in loads]
    running = [load.running for load in loads]
    axis.fill_between(minutes, running, step="post", color=BLUE, alpha=0.35, linewidth=0, label="samples that run")
    top = max(running, default=1) * 1.3
    for number, step in enumerate(result.counted):
        first, last = (step.update_start - begin) / 60, (step.end - begin) / 60
        axis.axvspan(first, last, ymin=0.9, color=ORANGE, linewidth=0, label="" if number else "update")
        axis.axvline(last, color=GREY, linewidth=0.8, linestyle=":", label="" if number else "end of a step")
    axis.set_title(f"{result.way}: {duration(result.step_seconds)} per step", loc="left", fontsize=12)
    axis.set_ylabel("samples")
    axis.set_ylim(0, top)
    axis.set_xlim(0, longest / 60)
    light_grid(axis)
    axis.legend(loc="upper right", bbox_to_anchor=(1, 1.16), ncols=3, fontsize=9, frameon=False)
