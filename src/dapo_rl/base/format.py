"""Formats numbers, paths and lines for people."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dapo_rl.base.quote import printable


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


def counted(number: int, name: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def gib(number: float) -> str:
    """Bytes in the largest of GiB, MiB and KiB that suits them."""
    if number >= 0.05 * 2**30:
        return f"{number / 2**30:,.1f} GiB"
    return f"{number / 2**20:,.1f} MiB" if number >= 0.05 * 2**20 else f"{number / 2**10:,.1f} KiB"


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
    """One character per value, scaled from the smallest to the largest; a blank for a missing value."""
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


def write_line(stream: TextIO, text: str) -> None:
    """Writes and flushes one line, whatever the stream's encoding."""
    encoding = stream.encoding or "utf-8"
    stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def short_path(path: str | os.PathLike[str]) -> str:
    """The path relative to the working directory, if it is inside it."""
    absolute = Path(path).absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)
