"""Describes the metrics and the summary of a run in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dapo_rl.base.format import count, counted, duration, fixed, percent, short_path
from dapo_rl.outcomes import LOGGED, OUTCOMES, tokens_label


def number(metrics: Mapping[str, Any], name: str) -> float:
    """A metric, or NaN if it is missing."""
    value = metrics.get(name)
    return math.nan if value is None else float(value)


def kept_and_filled(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """The groups kept for their signal, and those that filled up the batch without any."""
    filled = number(metrics, "sampling/filled_up")
    filled = filled if math.isfinite(filled) else 0.0
    return number(metrics, "sampling/kept") - filled, filled


def graded_score(metrics: Mapping[str, Any]) -> float | None:
    """The mean score of an evaluation; None if wrong and right are scored 0 and 1, or -1 and 1, so that the accuracy
    says the same."""
    accuracy, score = number(metrics, "eval/accuracy"), number(metrics, "eval/reward")
    if not math.isfinite(score) or min(abs(score - accuracy), abs(score - (2 * accuracy - 1))) < 1e-6:
        return None
    return score


def is_pretraining(metrics: Mapping[str, Any]) -> bool:
    """Whether a step trained the critic alone."""
    return has_critic(metrics) and number(metrics, "actor/updates") == 0


def has_critic(metrics: Mapping[str, Any]) -> bool:
    """Whether a step trained a critic."""
    return math.isfinite(number(metrics, "critic/vf_loss"))


def dropped(metrics: Mapping[str, Any]) -> list[str]:
    """The number of groups for every reason to drop them, such as `5 all right`."""
    labels = {outcome: OUTCOMES[outcome].label for outcome in LOGGED}
    return [
        f"{value:.0f} {labels[outcome]}{'s' if labels[outcome].endswith('error') and value != 1 else ''}"
        for outcome, value in drops(metrics).items()
    ]


def drops(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The number of dropped groups by outcome, without those that are 0."""
    counts = {outcome: number(metrics, f"sampling/{outcome}") for outcome in LOGGED if outcome != "kept"}
    return {outcome: value for outcome, value in counts.items() if math.isfinite(value) and value > 0}


def other_drops(metrics: Mapping[str, Any], graded: bool) -> str | None:
    """All dropped groups by reason, in one line; None if the line of the step has all of them."""
    found = drops(metrics)
    if set(found) <= ({"no_spread"} if graded else {"all_correct", "all_wrong"}):
        return None
    groups = f"{sum(found.values()):.0f} of {counted(int(number(metrics, 'sampling/drawn')), 'group')}"
    share = percent(number(metrics, "sampling/wasted_share"))
    tokens = "" if share == "-" else f" ({share} of tokens)"
    return f"dropped {groups}{tokens}: {', '.join(dropped(metrics))}"


def engines(metrics: Mapping[str, Any]) -> str | None:
    """One line on the engines of a step; None if the run has a single engine in its own process."""
    named = {name.split("/")[1] for name in metrics if re.fullmatch(r"engine/\d+/queue", name)}
    if not named:
        return None

    def each(figure: str) -> list[float]:
        values = (number(metrics, f"engine/{name}/{figure}") for name in named)
        return [value for value in values if math.isfinite(value)] or [math.nan]

    busy, versions, lost = each("busy"), each("version"), sum(each("lost"))
    parts = [
        f"busy {_span(*(percent(share) for share in (min(busy), max(busy))))}",
        f"{count(sum(each('tokens_per_s')))} tok/s",
        f"queue {count(sum(each('queue')))}",
        f"version {_span(*(fixed(version, 0) for version in (min(versions), max(versions))))}",
        *([f"lost {lost:.0f}"] if lost else []),
    ]
    return f"{counted(len(named), 'engine')}  {'  '.join(parts)}"


def ranks(metrics: Mapping[str, Any]) -> str | None:
    """One line on the ranks of a step; None if the run has none."""
    named = {name.split("/")[1] for name in metrics if re.fullmatch(r"rank/\d+/tokens", name)}
    if not named:
        return None
    tokens, busy, memory = (
        [number(metrics, f"rank/{name}/{figure}") for name in named] for figure in ("tokens", "busy", "memory_gib")
    )
    parts = [
        f"busy {_span(*(percent(share) for share in (min(busy), max(busy))))}",
        f"{_span(*(count(some) for some in (min(tokens), max(tokens))))} tokens each",
        f"{fixed(max(memory), 1)} GiB",
    ]
    return f"{counted(len(named), 'rank')}  {'  '.join(parts)}"


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary of a run as rows of a name and a text."""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    rows = []
    if before is not None and after is not None:
        change = f"{100 * (after - before):+.1f} points"
        rows.append(("held-out accuracy", f"{percent(before, 1)} -> {percent(after, 1)}  ({change})"))
    elif before is not None:
        rows.append(("held-out accuracy", f"{percent(before, 1)} before training"))
    elif after is not None:
        rows.append(("held-out accuracy", f"{percent(after, 1)} after training"))
    else:
        rows.append(("held-out accuracy", "not measured: no data.eval"))
    rows.append(("steps", str(summary.get("steps", "-"))))
    rows.append(("wall time", duration(number(summary, "wall_seconds"))))
    tokens = dict(summary.get("tokens") or {})
    total = tokens.pop("total", sum(tokens.values()))
    rows.append(("tokens generated", count(total)))
    for outcome, value in sorted(tokens.items(), key=lambda item: -item[1]):
        if value:
            share = percent(value / total if total else math.nan)
            rows.append((f"  {tokens_label(outcome)}", f"{count(value)}  ({share})"))
    rows.extend((name, short_path(path)) for name, path in (summary.get("paths") or {}).items())
    return rows
