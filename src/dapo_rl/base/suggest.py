"""Suggestions for misspelt names, at the end of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

CUTOFF = 0.6
"""Minimum similarity of a suggestion, from 0 to 1."""


def nearest(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest_path(path: Path, is_meant: Callable[[Path], bool], cutoff: float = CUTOFF) -> Path | None:
    """The existing neighbour of a missing path with the most similar name, among those that could be meant."""
    try:
        names = [neighbour.name for neighbour in path.parent.iterdir() if is_meant(neighbour)]
    except (OSError, ValueError):  # ValueError: a name with a null character
        return None
    close = nearest(path.name, names, cutoff)
    return None if close is None else path.parent / close


def did_you_mean(close: str | Path | None, otherwise: str = "") -> str:
    """The end of a message: `; did you mean X?`, or `; otherwise` if nothing is close, or nothing."""
    if close is not None:
        return f"; did you mean {close}?"
    return f"; {otherwise}" if otherwise else ""
