"""Explains errors of the operating system in one line."""

from __future__ import annotations

import errno

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


def explain_os_error(error: OSError) -> str | None:
    """One line with the path and the remedy; None if the user cannot fix it."""
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None or (error.filename is None and error.errno not in _OF_THE_MACHINE):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {remedy}"
