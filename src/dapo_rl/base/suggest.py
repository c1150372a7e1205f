"""The right name for one that is misspelt, as a message's last words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

CUTOFF = 0.6
"""How much of two names must agree for one to stand for the other, from 0 to 1."""


def nearest(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The one of `known` that `name` is most like."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest_path(path: Path, is_meant: Callable[[Path], bool], cutoff: float = CUTOFF) -> Path | None:
    """The neighbour of a path that is not there whose name is most like its own, among those that could be meant."""
    try:
        names = [neighbour.name for neighbour in path.parent.iterdir() if is_meant(neighbour)]
    except (OSError, ValueError):  # ValueError: a name with a null character
        return None
    close = nearest(path.name, names, cutoff)
    return None if close is None else path.parent / close


def did_you_mean(close: str | Path | None, otherwise: str = "") -> str:
    """`; did you mean X?`, to end a message with; where nothing is close, `; otherwise`, or nothing."""
    if close is not None:
        return f"; did you mean {close}?"
    return f"; {otherwise}" if otherwise else ""
