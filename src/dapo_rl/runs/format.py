"""Numbers as people read them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, get_args

from dapo_rl.errors import printable as printable
from dapo_rl.fates import FATES, Fate, tokens_label


def number(metrics: Mapping[str, Any], name: str) -> float:
    """A metric, or NaN where it is missing."""
    value = metrics.get(name)
    return math.nan if value is None else float(value)


def fixed(value: float, decimals: int = 2) -> str:
    return f"{value:.{decimals}f}" if math.isfinite(value) else "-"


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f}%" if math.isfinite(share) else "-"


def length(tokens: float) -> str:
    return fixed(tokens, 1 if tokens < 1000 else 0)


def count(value: float) -> str:
    """1234 as 1.2k: three or four characters and a unit."""
    if not math.isfinite(value):
        return "-"
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if not unit or abs(value) >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def duration(seconds: float) -> str:
    """The two largest units: 1.6s, 40s, 3m40s, 2h05m, 1d03h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def sparkline(values: Sequence[float], ramp: str = "▁▂▃▄▅▆▇█") -> str:
    """One character a value, from the least to the greatest; a blank where one is missing."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(ramp) - 1

    def character(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return ramp[round((value - low) / span * top)] if span > 0 else ramp[top // 2]

    return "".join(character(value) for value in values)


def dropped(metrics: Mapping[str, Any]) -> list[str]:
    """`5 all right`, for every reason why groups were dropped."""
    counts = ((FATES[fate].label, number(metrics, f"sampling/{fate}")) for fate in get_args(Fate) if fate != "kept")
    return [f"{value:.0f} {word}" for word, value in counts if math.isfinite(value) and value > 0]


def write_line(stream: TextIO, text: str) -> None:
    """One line, seen at once, on a stream of whatever encoding."""
    encoding = stream.encoding or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def short_path(path: str | os.PathLike[str]) -> str:
    """Relative to the working directory where it lies inside."""
    absolute = Path(path).absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The end of a run in a few lines: a name and a text each."""
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
    for fate, value in sorted(tokens.items(), key=lambda item: -item[1]):
        if value:
            share = percent(value / total if total else math.nan)
            rows.append((f"  {tokens_label(fate)}", f"{count(value)}  ({share})"))
    rows.extend((name, short_path(path)) for name, path in (summary.get("paths") or {}).items())
    return rows
