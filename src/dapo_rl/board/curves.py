"""Curves of the run log for the page: downsampled, raw or smoothed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from dapo_rl.runs.metrics_log import Floats, MetricsLog


def thin(steps: Floats, values: Floats, points: int) -> tuple[Floats, Floats]:
    """At most `points` points of a curve: the minimum and maximum of each interval, so that no spike is lost."""
    if len(steps) <= max(points, 4):
        return steps, values
    bounds = np.linspace(0, len(steps), max(points, 4) // 2, dtype=int)
    chosen = {0, len(steps) - 1}
    for start, end in pairwise(bounds):
        chosen |= {int(start + values[start:end].argmin()), int(start + values[start:end].argmax())}
    index = np.array(sorted(chosen))
    return steps[index], values[index]


def smooth_curve(steps: Floats, values: Floats, share: float, points: int) -> tuple[Floats, Floats]:
    """An exponential moving average over about `share` of the curve, with at most `points` points.

    A long curve is first averaged over intervals much shorter than the width of the average.
    """
    if len(steps) > points:
        bounds = np.linspace(0, len(steps), points + 1, dtype=int)[:-1]
        sizes = np.diff([*bounds, len(steps)])
        last = np.array([*bounds[1:], len(steps)]) - 1
        steps, values = steps[last], np.add.reduceat(values, bounds) / sizes
    keep = 1 - 2 / (max(1.0, share * len(steps)) + 1)
    result, average, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result[i] = average / weight
    return steps, result


def curve(
    log: MetricsLog, name: str, *, points: int, share: float, first: float = -math.inf, last: float = math.inf
) -> dict[str, Any]:
    steps, values = log.column(name, first, last)
    with np.errstate(over="ignore", invalid="ignore"):  # sums of values that no run would write
        return {
            "raw": plain_curve(*thin(steps, values, points)),
            "smooth": plain_curve(*smooth_curve(steps, values, share, points // 2)),
            "steps": len(steps),
        }


def with_start(curve: dict[str, Any], evaluations: Mapping[int, float]) -> dict[str, Any]:
    """Adds the evaluation before the first step, which logs of older versions do not have."""
    if 0 not in evaluations or (curve["raw"][0] and curve["raw"][0][0] <= 0):
        return curve
    start = evaluations[0]
    return curve | {key: [[0, *curve[key][0]], [start, *curve[key][1]]] for key in ("raw", "smooth")}


def plain_curve(steps: Floats, values: Floats) -> list[list[float]]:
    return [[int(step) for step in steps], [float(f"{value:.6g}") for value in values]]
