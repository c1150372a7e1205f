"""How the words of other people's code, and the values they gave us, are quoted in our messages."""

from __future__ import annotations

import traceback

LINE_LIMIT, TRACEBACK_LIMIT = 500, 5000
"""Characters of a quoted message, and of a quoted traceback."""


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
