"""Draws report.png: the paper's four curves, held-out accuracy, clipping, groups' outcomes, and the critic's two."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from dapo_rl.base.files import beside
from dapo_rl.base.quote import cut
from dapo_rl.outcomes import LOGGED, OUTCOMES
from dapo_rl.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from dapo_rl.runs.directory import LARGEST
from dapo_rl.runs.metric_text import has_critic, is_pretraining

Values = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
Evaluations = Sequence[tuple[int, float | None]]

SMOOTH_BEYOND = 20
"""With more steps than this, a smoothed line is drawn over the raw values."""

HEIGHT, MARGIN = 860, 14
"""Of the picture, in pixels."""
PANEL = 366, 318
LEFTS, BOTTOMS = (86, 549, 1060, 1520, 1990), (463, 56)
"""Where panels begin; the last column is the critic's. To have matplotlib find places for them takes as long as to draw
them."""


def draw_report(metrics: Rows, evaluations: Evaluations, path: Path, title: str) -> None:
    """Plots the records of metrics.jsonl and (step, held-out accuracy) pairs into a PNG."""
    canvas = FigureCanvasAgg(report_figure(metrics, evaluations, title))
    with beside(path) as draft:
        canvas.print_png(draft)  # `savefig` draws everything twice


def report_figure(metrics: Rows, evaluations: Evaluations, title: str) -> Figure:
    # Row 0 has only the evaluation before the first step, which `evaluations` has too.
    rows = sorted((row for row in metrics if row["step"] > 0), key=lambda row: row["step"])
    critic = any(has_critic(row) for row in rows)
    lefts = LEFTS if critic else LEFTS[:4]
    width = lefts[-1] + PANEL[0] + MARGIN
    figure = Figure(figsize=(width / 100, HEIGHT / 100), dpi=100)
    figure.suptitle(title, fontsize=15, fontweight="bold", parse_math=False)
    panels = [
        [figure.add_axes((left / width, bottom / HEIGHT, PANEL[0] / width, PANEL[1] / HEIGHT)) for left in lefts]
        for bottom in BOTTOMS
    ]
    (length, reward, entropy, probability), (held_out, clipping, outcomes, all_right) = (row[:4] for row in panels)
    _length(length, rows)
    _reward(reward, rows)
    _curve(entropy, rows, "Entropy", "nats per token", "actor/entropy", GREEN, headroom=0.08)
    _curve(probability, rows, "Mean probability of sampled tokens", "probability", "actor/prob", PURPLE)
    _held_out(held_out, rows, evaluations)
    _clipping(clipping, rows)
    _outcomes(outcomes, rows)
    share = "sampling/all_correct_share"
    _curve(all_right, rows, "Prompts that are all right", "share of the groups drawn", share, GREEN, headroom=0.08)
    all_right.yaxis.set_major_formatter(percent_tick)
    steps = [row["step"] for row in rows] + [step for step, _ in evaluations] or [0]
    of_critic = [row[4] for row in panels if critic]
    if critic:
        _explained(of_critic[0], rows)
        loss = "critic/vf_loss"
        _curve(of_critic[1], rows, "Value loss", "half the squared error", loss, ORANGE, headroom=0.2)
    for axis in (axis for row in panels for axis in row):
        _finish(axis, min(steps), max(steps))
        _pretraining(axis, rows, labelled=axis in of_critic)
    return figure


def _curve(
    axis: Axes, rows: Rows, title: str, unit: str, metric: str, color: str, headroom: float | None = None
) -> None:
    """A panel of one metric; with `headroom`, its scale starts at zero."""
    axis_title(axis, title, unit)
    _line(axis, rows, metric, color)
    if headroom is not None:
        _from_zero(axis, headroom)


def _length(axis: Axes, rows: Rows) -> None:
    axis_title(axis, "Response length", "tokens")
    _line(axis, rows, "response_length/max", SKY, "longest", faint=True)
    _line(axis, rows, "response_length/mean", BLUE, "mean")
    _from_zero(axis)
    _legend(axis)


def _reward(axis: Axes, rows: Rows) -> None:
    axis_title(axis, "Reward and training accuracy", "mean over samples")
    _line(axis, rows, "reward/mean", BLUE, "reward, shaped")
    _line(axis, rows, "acc/mean", ORANGE, "accuracy")
    names = reward_functions(rows)
    if len(names) > 1:
        for name, color in zip(names, cycle((GREEN, PURPLE, VERMILION, SKY, YELLOW, BLACK, GREY))):
            _line(axis, rows, f"reward/{name}/mean", color, cut(name.lstrip("_"), 24))
    _legend(axis)


def reward_functions(rows: Rows) -> list[str]:
    """The names of the reward functions that have a curve."""
    found = (re.fullmatch("reward/(.+)/mean", key) for key in dict.fromkeys(key for row in rows for key in row))
    return [match[1] for match in found if match]


def _held_out(axis: Axes, rows: Rows, evaluations: Evaluations) -> None:
    known = sorted((step, accuracy) for step, accuracy in evaluations if accuracy is not None and np.isfinite(accuracy))
    if not known:
        axis_title(axis, "Reward (no held-out prompts)", "mean over samples")
        _line(axis, rows, "reward/mean", BLUE)
        return
    axis_title(axis, "Held-out accuracy", "share of correct samples")
    steps, accuracies = zip(*known, strict=True)
    axis.plot(steps, accuracies, color=VERMILION, marker="o", markersize=5 if len(steps) <= 60 else 2)
    rising = accuracies[-1] >= accuracies[0]
    _value_label(axis, known[-1], "right", above=rising)
    if len(known) > 1:
        _value_label(axis, known[0], "left", above=not rising)
    axis.margins(y=0.2)
    axis.yaxis.set_major_formatter(percent_tick)


def _clipping(axis: Axes, rows: Rows) -> None:
    axis_title(axis, "Clipped tokens", "share of trained tokens")
    _line(axis, rows, "actor/pg_clipfrac_high", BLUE, "at the upper bound")
    _line(axis, rows, "actor/pg_clipfrac_low", ORANGE, "at the lower bound")
    _from_zero(axis, headroom=0.4)
    axis.yaxis.set_major_formatter(percent_tick)
    lines, labels = axis.get_legend_handles_labels()
    if np.isfinite(_values(rows, "actor/clipped_high_prob")).any():
        right = axis.twinx()
        _line(right, rows, "actor/clipped_high_prob", GREY, "mean probability at the upper bound (right)")
        _from_zero(right, headroom=0.4)
        right.set_ylabel("mean probability", color="#666666")
        right.spines["top"].set_visible(False)
        more_lines, more_labels = right.get_legend_handles_labels()
        lines, labels = [*lines, *more_lines], [*labels, *more_labels]
    _legend(axis, lines, labels, loc="upper left")


def _outcomes(axis: Axes, rows: Rows) -> None:
    axis_title(axis, "Outcome of the groups drawn", "groups per step")
    steps = _values(rows, "step")
    dropped = {outcome: np.nan_to_num(_values(rows, f"sampling/{outcome}")) for outcome in LOGGED}
    filled = np.nan_to_num(_values(rows, "sampling/filled_up"))
    counts = {"kept": dropped.pop("kept") - filled, "filled": filled, **dropped}
    counts = {outcome: values for outcome, values in counts.items() if values.any()}
    if not counts:
        return
    labels = [OUTCOMES[outcome].label for outcome in counts]
    colors = [OUTCOMES[outcome].ink for outcome in counts]
    heights = [smooth(values) if len(steps) > SMOOTH_BEYOND else values for values in counts.values()]
    if len(steps) == 1:
        bottoms = np.cumsum([0.0, *(values[0] for values in heights)])
        for label, color, values, bottom in zip(labels, colors, heights, bottoms[:-1], strict=True):
            axis.bar(steps, values, width=0.5, bottom=bottom, label=label, color=color)
    else:
        axis.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    _from_zero(axis, headroom=0.4)
    _legend(axis, loc="upper left", ncols=3)


def _explained(axis: Axes, rows: Rows) -> None:
    axis_title(axis, "Explained variance of the critic", "1 is perfect, 0 is a constant")
    _line(axis, rows, "critic/vf_explained_var", BLUE)
    axis.axhline(0, color=GREY, linewidth=0.8)
    # The first values can be far below 0, where the size means nothing.
    axis.set_ylim(bottom=max(axis.get_ylim()[0], -1.0))


def _pretraining(axis: Axes, rows: Rows, *, labelled: bool) -> None:
    """Shades the steps that trained the critic alone."""
    last = max((row["step"] for row in rows if is_pretraining(row)), default=None)
    if last is None:
        return
    start = axis.get_xlim()[0]
    axis.axvspan(start, last + 0.5, color=GREY, alpha=0.15, linewidth=0, zorder=0)
    if labelled:
        at = axis.get_xaxis_transform()
        axis.text(start, 0.99, " value\n pre-training", transform=at, va="top", fontsize=9, color="#666666")


def axis_title(axis: Axes, title: str, unit: str) -> None:
    axis.set_title(title, loc="left", fontsize=12)
    axis.set_ylabel(unit)


def _legend(
    axis: Axes, lines: Sequence[Any] = (), labels: Sequence[str] = (), *, loc: str = "best", ncols: int = 1
) -> None:
    if not lines:
        lines, labels = axis.get_legend_handles_labels()
    if lines:
        axis.legend(lines, labels, loc=loc, ncols=ncols, fontsize=9, framealpha=0.85, edgecolor="none")


def _from_zero(axis: Axes, headroom: float = 0.08) -> None:
    """Starts the scale at zero, and leaves room above the data for labels."""
    top = axis.dataLim.y1
    axis.set_ylim(0, top * (1 + headroom) if np.isfinite(top) and top > 0 else 1)


def _value_label(axis: Axes, point: tuple[int, float], side: str, *, above: bool) -> None:
    offset = (0, 8 if above else -16)
    axis.annotate(f"{point[1]:.1%}", point, xytext=offset, textcoords="offset points", ha=side, color=BLACK)


def _finish(axis: Axes, first: int, last: int) -> None:
    margin = max(0.04 * (last - first), 0.5)
    axis.set_xlim(first - margin, last + margin)
    step_axis(axis)
    if not axis.has_data():
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=GREY)


def step_axis(axis: Axes) -> None:
    """Rollout steps on the horizontal axis."""
    axis.set_xlabel("rollout step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    light_grid(axis)


def light_grid(axis: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    axis.grid(axis=which, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _line(axis: Axes, rows: Rows, name: str, color: str, label: str = "", *, faint: bool = False) -> None:
    """Plots the raw values and, if there are many, their moving mean."""
    values = _values(rows, name)
    if not np.isfinite(values).any():
        return
    steps = _values(rows, "step")
    many = len(values) > SMOOTH_BEYOND
    style: dict[str, Any] = {"linewidth": 1.0} if many else {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
    if many or faint:
        style["alpha"] = 0.3 if len(values) < 1000 else 0.2
    smoothed = many and not faint
    axis.plot(steps, values, color=color, **style, label=None if smoothed else label or None)
    if smoothed:
        axis.plot(steps, smooth(values), color=color, linewidth=1.8, label=label or None)


def smooth(values: Values) -> Values:
    """The centred moving mean over about a twentieth of the values, ignoring missing ones."""
    half = max(2, len(values) // 40)
    known = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(known, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(known)))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    number = counts[high] - counts[low]
    means: Values = np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)
    return means


def _values(rows: Rows, name: str) -> Values:
    return np.array([float(row[name]) if _is_number(row.get(name)) else np.nan for row in rows], dtype=np.float64)


def percent_tick(share: float, position: float) -> str:
    return f"{100 * share:.3g}%"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST  # False for NaN
