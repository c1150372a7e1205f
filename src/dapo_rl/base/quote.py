"""How the words of other people's code, and the values they gave us, are quoted in our messages."""

from __future__ import annotations

import traceback
from typing import Any

LINE_LIMIT, TRACEBACK_LIMIT = 500, 5000
"""Characters of a quoted message, and of a quoted traceback."""
HUGE = "a huge number"


def cut(text: str, limit: int) -> str:
    """The head of a text longer than `limit`, for the middle of a line."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(value: Any, limit: int = 80) -> str:
    """A value in a message: long ones are cut off."""
    try:
        return cut(repr(value), limit)
    except ValueError:  # Python writes no number of more than 4300 digits
        return HUGE


def one_line(said: BaseException | str, limit: int = 300) -> str:
    """A library's message, fit for the end of a line of ours."""
    return cut(" ".join(str(said).split()) or type(said).__name__, limit)


def shorten(text: str, limit: int = LINE_LIMIT) -> str:
    """The head and the tail of a text longer than `limit`, with a note of how much is missing between them."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]} … ({len(text) - limit:,} characters cut) … {text[-tail:]}"


def printable(text: str) -> str:
    """Without the control characters with which a text could steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def describe(error: BaseException) -> str:
    """An exception of someone else's code as `Type: message`: on one line, shortened, printable."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    text = shorten(" ".join(f"{type(error).__name__}: {message}".split()))
    return printable(text).removesuffix(":")


def describe_traceback(error: BaseException) -> str:
    """Where an exception of someone else's code comes from: shortened, printable."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        return ""
    return printable(shorten("".join(lines), TRACEBACK_LIMIT))
