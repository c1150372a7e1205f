"""Quotes values, and messages from other code, in error messages."""

from __future__ import annotations

import traceback
from typing import Any

LINE_LIMIT, TRACEBACK_LIMIT = 500, 5000
"""Maximum characters of a quoted message and of a quoted traceback."""
HUGE = "a huge number"


def cut(text: str, limit: int) -> str:
    """Truncates a text to `limit` characters, ending in `…`."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: Any, limit: int = 80) -> str:
    """The repr of a value, truncated."""
    try:
        return cut(repr(value), limit)
    except ValueError:  # Python refuses to print more than 4300 digits
        return HUGE


def one_line(said: BaseException | str, limit: int = 300) -> str:
    """A library's message on one line, truncated."""
    return cut(" ".join(str(said).split()) or type(said).__name__, limit)


def shorten(text: str, limit: int = LINE_LIMIT) -> str:
    """The head and the tail of a text longer than `limit`, with a note of how much was cut between them."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]} … ({len(text) - limit:,} characters cut) … {text[-tail:]}"


def printable(text: str) -> str:
    """Escapes control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def describe(error: BaseException) -> str:
    """An exception from other code as `Type: message`: on one line, shortened, printable."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    text = shorten(" ".join(f"{type(error).__name__}: {message}".split()))
    return printable(text).removesuffix(":")


def describe_traceback(error: BaseException) -> str:
    """The traceback of an exception from other code: shortened, printable."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        return ""
    return printable(shorten("".join(lines), TRACEBACK_LIMIT))
