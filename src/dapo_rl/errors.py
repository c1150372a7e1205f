"""The errors a user can meet, and how the words of other people's code are quoted in them.

Everything else that escapes is a bug of ours.
"""

from __future__ import annotations

import traceback

LINE_LIMIT, TRACEBACK_LIMIT = 500, 5000
"""Characters of a quoted message, and of a quoted traceback."""


class UserError(Exception):
    """A mistake in what the user gave us: shown as one line, exit code 2.

    `more` goes below that line: the traceback of a function of the user's own.
    """

    exit_code = 2

    def __init__(self, message: str, more: str = "") -> None:
        super().__init__(message)
        self.more = more


class NonFiniteError(ArithmeticError):
    """A log-probability, loss or gradient that is not a number, met before the weights were touched."""


class DivergedError(Exception):
    """A run that met a number that is not finite stops with everything saved untouched, exit code 3."""

    exit_code = 3

    def __init__(self, step: int, what: str, checkpoint: str | None) -> None:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written yet"
        super().__init__(
            f"diverged at step {step}: {what}; {kept}. "
            "Lower train.lr or train.max_grad_norm, or look at the last rollouts of the run."
        )
        self.step, self.what, self.checkpoint = step, what, checkpoint


class CapReachedError(UserError):
    """Dynamic sampling drew `sampling.cap` groups and could not fill the batch, with `sampling.on_cap: error`."""


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
