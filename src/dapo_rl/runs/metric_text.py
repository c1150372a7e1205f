"""Describes the metrics and the summary of a run in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
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
    number_of, each = _members(metrics, "engine", "queue")
    if not number_of:
        return None
    lost = sum(each("lost"))
    parts = [
        f"busy {_span(each('busy'), percent)}",
        f"{count(sum(each('tokens_per_s')))} tok/s",
        f"queue {count(sum(each('queue')))}",
        f"version {_span(each('version'), lambda version: fixed(version, 0))}",
        *([f"lost {lost:.0f}"] if lost else []),
    ]
    return f"{counted(number_of, 'engine')}  {'  '.join(parts)}"


def ranks(metrics: Mapping[str, Any]) -> str | None:
    """One line on the ranks of a step; None if the run has none."""
    number_of, each = _members(metrics, "rank", "tokens")
    if not number_of:
        return None
    busy, tokens = _span(each("busy"), percent), _span(each("tokens"), count)
    return f"{counted(number_of, 'rank')}  busy {busy}  {tokens} tokens each  {fixed(max(each('memory_gib')), 1)} GiB"


def _members(metrics: Mapping[str, Any], kind: str, always: str) -> tuple[int, Callable[[str], list[float]]]:
    """The number of engines or ranks, which all have one figure, and a function that finds their values of another."""
    names = [name.removesuffix(always) for name in metrics if re.fullmatch(rf"{kind}/\d+/{always}", name)]

    def each(figure: str) -> list[float]:
        values = (number(metrics, name + figure) for name in names)
        return [value for value in values if math.isfinite(value)] or [math.nan]

    return len(names), each


def _span(values: Sequence[float], text: Callable[[float], str]) -> str:
    least, most = text(min(values)), text(max(values))
    return least if least == most else f"{least} to {most}"


def closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary of a run as rows of a name and a text."""
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    accuracy = "not measured: no data.eval"
    if before is not None and after is not None:
        accuracy = f"{percent(before, 1)} -> {percent(after, 1)}  ({100 * (after - before):+.1f} points)"
    elif before is not None:
        accuracy = f"{percent(before, 1)} before training"
    elif after is not None:
        accuracy = f"{percent(after, 1)} after training"
    tokens = dict(summary.get("tokens") or {})
    total = tokens.pop("total", sum(tokens.values()))
    rows = [
        ("held-out accuracy", accuracy),
        ("steps", str(summary.get("steps", "-"))),
        ("wall time", duration(number(summary, "wall_seconds"))),
        ("tokens generated", count(total)),
    ]
    for outcome, value in sorted(tokens.items(), key=lambda item: -item[1]):
        if value:
            share = percent(value / total if total else math.nan)
            rows.append((f"  {tokens_label(outcome)}", f"{count(value)}  ({share})"))
    rows.extend((name, short_path(path)) for name, path in (summary.get("paths") or {}).items())
    return rows
