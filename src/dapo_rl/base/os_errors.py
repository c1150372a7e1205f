"""Explains errors of the operating system in one line."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from dapo_rl.base.quote import one_line

_CHECK = "check the path"
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit on file sizes with `ulimit -f`",
    errno.EMFILE: "raise the limit on open files with `ulimit -n`",
    errno.ENFILE: "stop some programs on this machine",
    errno.EACCES: "check its permissions, or name another",
    errno.EPERM: "check its permissions, or name another",
    errno.EROFS: "name a path that can be written",
    errno.ENOENT: _CHECK,
    errno.ENOTDIR: _CHECK,
    errno.EISDIR: _CHECK,
    errno.EEXIST: _CHECK,
    errno.ENAMETOOLONG: _CHECK,
    errno.ELOOP: _CHECK,
    errno.EIO: "the disk or its connection may be failing",
    errno.ESTALE: "the file server has lost it; try again",
}
"""Errors that a user can fix. Any other (a closed file, a broken connection) is a bug."""
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO)
"""Errors without a path, from writing to an open file."""


def reason_and_remedy(error: Exception) -> tuple[str, str]:
    """Why a file cannot be written, and what to do about it; the remedy is empty if there is none. Libraries report
    errors of the system in their own classes."""
    number = next((of.errno for of in _chain(error) if isinstance(of, OSError)), None)
    if number is None and (found := re.search(r"\b(?:errno|os error) (\d+)", str(error), re.IGNORECASE)):
        number = int(found[1])
    reason = os.strerror(number) if number is not None and number in errno.errorcode else one_line(error)
    return reason, REMEDIES.get(number or 0, "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from, or while they were handled."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def explain_os_error(error: OSError) -> str | None:
    """One line with the path and the remedy; None if the user cannot fix it."""
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None or (error.filename is None and error.errno not in _OF_THE_MACHINE):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {remedy}"
