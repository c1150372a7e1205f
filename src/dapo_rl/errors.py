"""The errors a user can meet, and how the words of other people's code are quoted in them.

Everything else that escapes is a bug of ours.
"""

from __future__ import annotations

import errno
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


_CHECK = "check the path"
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "no file may be larger than `ulimit -f` says",
    errno.EMFILE: "raise the number of open files with `ulimit -n`",
    errno.ENFILE: "end some of what runs on this machine",
    errno.EACCES: "check its permissions, or name another",
    errno.EPERM: "check its permissions, or name another",
    errno.EROFS: "name a path that can be written",
    errno.ENOENT: _CHECK,
    errno.ENOTDIR: _CHECK,
    errno.EISDIR: _CHECK,
    errno.EEXIST: _CHECK,
    errno.ENAMETOOLONG: _CHECK,
    errno.ELOOP: _CHECK,
    errno.EIO: "the disk, or the way to it, may be failing",
    errno.ESTALE: "the file server has lost it; try again",
}
"""What a user can mend of what the system refuses. Anything else (a closed file, a connection) is a bug of ours."""
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO)
"""These come without a path, where an open file is written to."""


def explain_os_error(error: OSError) -> str | None:
    """One line with the path and the remedy; none where the user has none."""
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None or (error.filename is None and error.errno not in _OF_THE_MACHINE):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {remedy}"
